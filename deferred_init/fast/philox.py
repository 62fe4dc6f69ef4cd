"""Philox4x32, a counter-based generator, in exact integer arithmetic of torch.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011. A bijection of 128-bit counters for each 64-bit key; no state.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

__all__ = ["KEY_STEPS", "MULTIPLIERS", "ROUNDS", "Key", "philox", "stream_key"]

ROUNDS = 7
"""Rounds of a fill; the paper recommends 10, and finds that 7 pass BigCrush."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFF_FFFF

Key = tuple[int, int, int, int]
"""Key words 0 and 1, and counter words 2 and 3: what tells streams apart."""


def stream_key(seed: int, name: str, ordinal: int) -> Key:
    """Return the stream of the n-th random operation on the tensor of a name.

    The first 128 bits of SHA-256 over `"fast:{seed}:{name}:{ordinal}"`, as four
    little-endian words.
    """
    digest = hashlib.sha256(f"fast:{seed}:{name}:{ordinal}".encode()).digest()
    words = [int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12)]
    return words[0], words[1], words[2], words[3]


def philox(
    counters: Tensor, key: Key, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words for each counter.

    Args:
        counters: int64, not negative: counter words 0 and 1.
        key: Key words 0 and 1, counter words 2 and 3.
        rounds: How often the bijection is applied.

    Returns:
        Four int64 tensors of the shape of `counters`, values below 2**32.
    """
    key0, key1, word2, word3 = key
    c0, c1 = counters & _MASK, (counters >> 32) & _MASK
    c2, c3 = c0.new_full((), word2), c0.new_full((), word3)
    for _ in range(rounds):
        # The product wraps into the sign; its bits are those of an unsigned one.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> 32 & _MASK) ^ c1 ^ key0, second & _MASK
        c2, c3 = (first >> 32 & _MASK) ^ c3 ^ key1, first & _MASK
        key0, key1 = (key0 + KEY_STEPS[0]) & _MASK, (key1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3

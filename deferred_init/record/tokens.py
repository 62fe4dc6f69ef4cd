"""Tokens that stand in a generator while draws from it are recorded.

[Note: Tokens in place of states]
Nothing is drawn while a constructor is recorded, so a generator stays where it was,
and seeding it twice with one seed would leave no trace. So the generator holds a
token meanwhile, another one after every recorded draw: a state that nobody else makes.
A state that is no token was set by the constructor; an older token means that a saved
state was put back (`fork_rng`, `set_rng_state`).

On the CPU the token stands in the numbers of the Mersenne twister and the seed stays,
so that `torch.initial_seed()` tells what it tells in eager construction. A generator of
another device is given a seed of its own as a token.
"""

from __future__ import annotations

import ctypes
import secrets

import torch
from torch import Tensor

from deferred_init.record.paused import no_function_modes

__all__ = ["Tokens", "is_token_state"]

# A state of the CPU's generator: the seed, 16 bytes on the place in the numbers, and
# 624 numbers of 32 bits in 8 bytes each. The first two say that it is a token.
_Words = ctypes.c_uint64 * 7
_FIRST = 3
_NUM_BYTES = torch.Generator().get_state().numel()
_MAGIC = (0xD3F3_44ED, 0x70C3_2217)


class Tokens:
    """The tokens of one generator and what each of them stands for.

    Attributes:
        token: The latest.
        positions: For each token the number of nodes that had been recorded.
    """

    __slots__ = ("_generator", "_on_cpu", "_state", "_words", "positions", "token")

    def __init__(self, generator: torch.Generator, position: int) -> None:
        self._generator = generator
        self._state = generator.get_state()
        self._on_cpu = generator.device.type == "cpu"
        if self._on_cpu:
            self._words = _words_of(self._state)
            self._words[_FIRST : _FIRST + 2] = list(_MAGIC)
        self.token = 0
        self.positions: dict[int, int] = {}
        self.renew(position)

    def renew(self, position: int) -> None:
        """Give the generator a new token, which stands for `position`."""
        if not self.token:
            self.token = secrets.randbits(61) + (1 << 61)
        else:
            self.token += 1
        self.positions[self.token] = position
        if not self._on_cpu:
            self._generator.manual_seed(self.token)
            return
        self._words[0] = self._generator.initial_seed()
        self._words[_FIRST + 2] = self.token >> 32
        self._words[_FIRST + 3] = self.token & 0xFFFF_FFFF
        self._generator.set_state(self._state)

    def now(self) -> int | None:
        """Return the token that the generator holds; None for a state that is none.

        On another device than the CPU this is its seed, which need not be a token.
        """
        if not self._on_cpu:
            return self._generator.initial_seed()
        return _token_in(self._generator.get_state())


def is_token_state(state: Tensor) -> bool:
    """Whether a tensor is a state of the CPU's generator that was saved meanwhile."""
    return (
        state.dtype is torch.uint8
        and state.numel() == _NUM_BYTES
        and state.device.type == "cpu"
        and state.is_contiguous()
        and _token_in(state) is not None
    )


def _token_in(state: Tensor) -> int | None:
    words = _words_of(state)
    first, second, high, low = words[_FIRST:]
    return high << 32 | low if (first, second) == _MAGIC else None


def _words_of(state: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """Return the first words of a state, in its memory."""
    with no_function_modes():
        return _Words.from_address(state.data_ptr())

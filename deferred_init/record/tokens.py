"""Tokens that stand in a generator while draws from it are recorded.

[Note: Tokens in place of states]
Nothing is drawn while a constructor is recorded, so a generator stays where it was,
and seeding it twice with one seed would leave no trace. So the generator holds a
token meanwhile, another one after every recorded draw: a state that nobody else makes.
A state that is no token was set by the constructor; an older token means that a saved
state was put back (`fork_rng`, `set_rng_state`).

On the CPU the token stands in the numbers of the Mersenne twister and the seed stays,
so that `torch.initial_seed()` tells what it tells in eager construction. On CUDA it
stands in the offset, beyond every offset that drawing reaches, and the seed stays too.
A generator of another device is given a seed of its own as a token.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.paused import no_function_modes

__all__ = ["Tokens", "device_of", "is_token_state", "token_in"]

# A state of the CPU's generator: the seed, 16 bytes on the place in the numbers, and
# 624 numbers of 32 bits in 8 bytes each. The first two say that it is a token.
_CPU_BYTES = torch.Generator().get_state().numel()
_Words = ctypes.c_uint64 * 7
_FIRST = 3
_MAGIC = (0xD3F3_44ED, 0x70C3_2217)
# One of CUDA's: the seed, and an offset that is a multiple of 4.
_CUDA_BYTES = 16
_Pair = ctypes.c_uint64 * 2
_OFFSET_BITS = 2
_LEAST = 1 << 57
"""Tokens are numbers from here to twice as much."""


class Tokens:
    """The tokens of one generator and what each of them stands for.

    Attributes:
        token: The latest.
        positions: For each token the number of nodes that had been recorded.
    """

    __slots__ = ("_generator", "_kind", "_state", "_words", "positions", "token")

    def __init__(self, generator: torch.Generator, position: int) -> None:
        self._generator = generator
        self._kind = generator.device.type
        self._state = generator.get_state()
        self._words: Any = None
        if self._kind == "cpu":
            self._words = _in_memory(_Words, self._state)
            self._words[_FIRST : _FIRST + 2] = list(_MAGIC)
        elif self._kind == "cuda":
            self._words = _in_memory(_Pair, self._state)
        self.token = 0
        self.positions: dict[int, int] = {}
        self.renew(position)

    def renew(self, position: int) -> None:
        """Give the generator a new token, which stands for `position`."""
        if not self.token:
            self.token = secrets.randbelow(_LEAST) + _LEAST
        else:
            self.token += 1
        self.positions[self.token] = position
        if self._words is None:
            self._generator.manual_seed(self.token)
            return
        self._words[0] = self._generator.initial_seed() & 0xFFFF_FFFF_FFFF_FFFF
        if self._kind == "cpu":
            self._words[_FIRST + 2] = self.token >> 32
            self._words[_FIRST + 3] = self.token & 0xFFFF_FFFF
        else:
            self._words[1] = self.token << _OFFSET_BITS
        self._generator.set_state(self._state)

    def now(self) -> int | None:
        """Return the token that the generator holds; None for a state that is none.

        On a device that is neither this is its seed, which need not be a token.
        """
        if self._words is None:
            return self._generator.initial_seed()
        return token_in(self._generator.get_state())

    def is_own(self, state: object) -> bool:
        """Whether a tensor is what the tokens are written with."""
        return state is self._state


def device_of(state: object) -> torch.device | None:
    """Return of which device's generator an object may be a state, if of any."""
    if (
        not isinstance(state, Tensor)
        or state.dtype is not torch.uint8
        or state.device.type != "cpu"
        or state.dim() != 1
        or not state.is_contiguous()
    ):
        return None
    if state.numel() == _CPU_BYTES:
        return torch.device("cpu")
    if state.numel() != _CUDA_BYTES or not torch.cuda.is_initialized():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def is_token_state(state: Tensor) -> bool:
    """Whether a tensor is a generator's state that was saved meanwhile."""
    return device_of(state) is not None and token_in(state) is not None


def token_in(state: Tensor) -> int | None:
    """Return the token in a state of a generator of the CPU or of CUDA."""
    if state.numel() == _CUDA_BYTES:
        token = int(_in_memory(_Pair, state)[1]) >> _OFFSET_BITS
        return token if token >= _LEAST else None
    if state.numel() != _CPU_BYTES:
        return None
    first, second, high, low = _in_memory(_Words, state)[_FIRST:]
    return int(high << 32 | low) if (first, second) == _MAGIC else None


def _in_memory(kind: Any, state: Tensor) -> Any:
    """Return the first words of a state, in its memory."""
    with no_function_modes():
        return kind.from_address(state.data_ptr())

"""States of generators that a constructor saved, and that live on outside.

[Note: Saved states are tokens]
Megatron's and Transformer Engine's trackers keep a named state each, put it into the
generator for a while (`fork`), and save it again. Such a state that was saved inside a
constructor holds a token of the recording, see `tokens.py`: nothing had been drawn.

So when the constructor has ended, the states that hold its tokens are looked for, among
all objects of the process, and remembered by weak references. The replay writes into
them, in place, what the generator's state is at that point. Where nothing is drawn (by
name; everything was loaded), they are given the state as if nothing had been.
A constructor that begins with a state that an earlier one left, before that one was
replayed, records a `Resume`.

CUDA generators can also share a state (`graphsafe_set_state`). Then the token stands in
the state of another `torch.Generator`, which is reached through one that shares it.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deferred_init.record.events import GeneratorEvent, Reseed, Resume, Rewind
from deferred_init.record.paused import no_function_modes
from deferred_init.record.tokens import Tokens, is_token_state, token_in
from deferred_init.record.trackers import copy_of, put_into

if TYPE_CHECKING:
    from deferred_init.record.graph import Recording

__all__ = ["KeptState", "SharedStates", "is_kept", "kept_states", "origin_of"]
__all__ += ["remember_kept", "settle_undrawn", "undrawn_state", "unsettle", "waiting"]

_open: weakref.WeakSet[Recording] = weakref.WeakSet()
"""Recordings whose kept states hold tokens, or have held them."""


class KeptState:
    """One state that holds a token.

    Attributes:
        device: The device whose default generator it was saved from.
        position: Index of the first node after the place where it was saved.
        token: What it holds until it is settled.
        settled: What it was given.
    """

    __slots__ = ("_holder", "_unsettled", "device", "position", "settled", "token")

    def __init__(
        self, holder: Tensor | torch.Generator, device: torch.device, tokens: Tokens
    ) -> None:
        self._unsettled = _read(holder).clone()
        token = token_in(self._unsettled)
        assert token is not None, "looked for because it holds one"
        self._holder: Callable[[], Any]
        if isinstance(holder, Tensor):
            self._holder = weakref.ref(holder)
        else:
            self._holder = lambda: holder
        self.device = device
        self.position = tokens.positions[token]
        self.token = token
        self.settled: Tensor | None = None

    def settle(self, state: Tensor) -> None:
        """Write a state in the token's place, unless somebody has been there."""
        before = self._unsettled if self.settled is None else self.settled
        self.settled = state
        self._write(state, instead_of=before)

    def unsettle(self) -> None:
        """Put the token back."""
        if self.settled is not None:
            self._write(self._unsettled, instead_of=self.settled)
            self.settled = None

    def is_at(self, position: int, device: torch.device) -> bool:
        """Whether it was saved at a place, from the generator of a device."""
        return self.position == position and self.device == device

    def is_in(self, state: Tensor) -> bool:
        """Whether a tensor is this state."""
        return self._holder() is state

    def _write(self, state: Tensor, *, instead_of: Tensor) -> None:
        holder = self._holder()
        if holder is None or not torch.equal(_read(holder), instead_of):
            return
        if isinstance(holder, torch.Generator):
            holder.set_state(state)
            return
        # No write that torch counts: recorded code may have read it as it will be.
        with no_function_modes():
            ctypes.memmove(holder.data_ptr(), state.data_ptr(), state.numel())


class SharedStates:
    """The states that CUDA generators were given to share, beside their own.

    Attributes:
        found: A generator for each, which shares it.
    """

    def __init__(self) -> None:
        self.found: list[torch.Generator] = []
        self._own: list[torch.Generator] = []

    def begin(self, generator: torch.Generator) -> None:
        """Remember a generator's own state."""
        if hasattr(generator, "graphsafe_get_state"):
            self._own.append(generator.graphsafe_get_state())

    def look(self, generator: torch.Generator) -> None:
        """Remember what a generator shares at present, before it has a new token.

        All that are known hold tokens, so that equal ones are the same.
        """
        if not self._own:
            return
        state = generator.get_state()
        known = (*self._own, *self.found)
        if not any(torch.equal(one.get_state(), state) for one in known):
            self.found.append(generator.graphsafe_get_state())


def kept_states(
    defaults: Mapping[torch.device, Tokens], generators: Iterable[torch.Generator]
) -> tuple[KeptState, ...]:
    """Find the states that hold tokens of default generators.

    Args:
        defaults: The tokens by device.
        generators: Others that may have been given their states.
    """
    found = []
    holders: list[Tensor | torch.Generator] = [*_saved_states(), *generators]
    for holder in holders:
        token = token_in(_read(holder))
        for device, tokens in defaults.items():
            if token in tokens.positions and not tokens.is_own(holder):
                found.append(KeptState(holder, device, tokens))
    return tuple(found)


def _saved_states() -> Iterator[Tensor]:
    with no_function_modes():
        for found in gc.get_objects():
            if type(found) is Tensor and is_token_state(found):
                yield found


def remember_kept(recording: Recording) -> None:
    """Let later recordings begin with the states that this one left."""
    if recording.kept:
        _open.add(recording)


def origin_of(token: int) -> tuple[Recording, int] | None:
    """Return the recording in which a state with a token was saved, and where."""
    for recording in _open:
        for kept in recording.kept:
            if kept.token == token:
                return recording, kept.position
    return None


def is_kept(state: Tensor) -> bool:
    """Whether a state that holds a token will be given its value by a replay."""
    return any(kept.is_in(state) for recording in _open for kept in recording.kept)


def undrawn_state(recording: Recording, position: int, device: torch.device) -> Tensor:
    """Return the state of a default generator at a place if nothing had been drawn."""
    while position > 0:
        position -= 1
        event = recording.nodes[position]
        if not isinstance(event, GeneratorEvent) or event.device != device:
            continue
        if isinstance(event, Reseed):
            return event.state
        if isinstance(event, Resume):
            return undrawn_state(event.recording, event.position, device)
        assert isinstance(event, Rewind)
        position = event.position
    if device.type == "cpu":
        return recording.cpu_start
    return recording.cuda_starts[device.index]


def waiting(modules: Iterable[nn.Module]) -> list[Recording]:
    """Return the recordings of modules whose states no replay has settled."""
    found = [r for r in _open if any(kept.settled is None for kept in r.kept)]
    known = list(modules) if found else []
    return [r for r in found if any(module in r.places for module in known)]


def settle_undrawn(recording: Recording) -> None:
    """Settle what no replay has settled, as if nothing had been drawn."""
    for kept in recording.kept:
        if kept.settled is None:
            kept.settle(undrawn_state(recording, kept.position, kept.device))
    for tracked in recording.trackers:
        for name, state in tracked.tracker.get_states().items():
            if name in tracked.places and is_token_state(copy_of(state)):
                device, position = tracked.places[name]
                undrawn = undrawn_state(recording, position, device)
                put_into(tracked.tracker, {name: undrawn})


def unsettle(recording: Recording) -> None:
    """Put the tokens back into the states that a recording was asked for."""
    for kept in recording.kept:
        kept.unsettle()


def _read(holder: Tensor | torch.Generator) -> Tensor:
    return holder.get_state() if isinstance(holder, torch.Generator) else holder

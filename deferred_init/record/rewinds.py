"""Generator states at the places of a recording that somebody went back to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from deferred_init.record.events import GeneratorEvent, Reseed, Resume, Rewind
from deferred_init.record.generators import Generators, seeded_state
from deferred_init.record.graph import Recording
from deferred_init.record.kept_states import undrawn_state
from deferred_init.record.nodes import Mark
from deferred_init.record.tokens import is_token_state
from deferred_init.record.trackers import SavedAt, Tracked, copy_of, put_into

__all__ = ["Rewinds"]


class Rewinds:
    """Saves states where a later event, or a state that was saved, will need them.

    Args:
        recording: What is replayed.
        generators: Those of the replay.
        resumed: Computes the state with which an event resumes another recording.
    """

    def __init__(
        self,
        recording: Recording,
        generators: Generators,
        resumed: Callable[[Resume], Tensor],
    ) -> None:
        self._recording = recording
        self._generators = generators
        self._resumed = resumed
        self._positions = set(_places_gone_back_to(recording))
        self._lent = False
        self._on_loan: Tracked | None = None
        self._settled = False
        self._saved: dict[int, dict[torch.Generator, Tensor]] = {}

    def passing(self, position: int, generators: Iterable[torch.Generator]) -> None:
        """Keep the states at a place, if somebody goes back to it."""
        if position in self._positions:
            self._saved[position] = {g: g.get_state() for g in generators}

    def apply(
        self, event: GeneratorEvent, generators: Iterable[torch.Generator]
    ) -> None:
        """Do to the default generators what the constructor did."""
        for generator in generators:
            if not self._generators.concerns(event, generator):
                continue
            if isinstance(event, Rewind):
                state = self._saved[event.position][generator]
            elif isinstance(event, Resume):
                state = self._resumed(event)
            else:
                assert isinstance(event, Reseed)
                seeded = seeded_state(generator, event)
                if seeded is None:
                    continue
                state = seeded
            generator.set_state(state)

    def lend(self, mark: Mark) -> None:
        """Give the tracker of a module that is about to draw its states there."""
        if mark.tracked is not None:
            self._lent = True
            self._on_loan = mark.tracked
            put_into(mark.tracked.tracker, self._states_of(mark.tracked, drawn=True))

    def take_back(self) -> None:
        """Let those who go on from these states go on from where the module stopped."""
        if self._on_loan is None:
            return
        now = self._on_loan.tracker.get_states()
        for name, (device, position) in self._on_loan.places.items():
            generator = self._generators.standing_for(device)
            if generator is not None:
                self._saved[position][generator] = copy_of(now[name])
        self._on_loan = None

    def settle(self, *, drawn: bool) -> None:
        """Give the states that the constructor saved what eager would have saved.

        Args:
            drawn: Whether the replay drew the numbers; if not, they are given what
                they would be if nothing had been drawn.
        """
        if self._settled:
            return
        self._settled = True
        for kept in self._recording.kept:
            kept.settle(self._state_at((kept.device, kept.position), drawn))
        for tracked in self._recording.trackers:
            now = tracked.tracker.get_states()
            states = self._states_of(tracked, drawn)
            if not self._lent:  # then somebody else may have drawn from them since
                states = {
                    n: s for n, s in states.items() if is_token_state(copy_of(now[n]))
                }
            put_into(tracked.tracker, states)

    def _states_of(self, tracked: Tracked, drawn: bool) -> dict[str, Tensor]:
        return {n: self._state_at(at, drawn) for n, at in tracked.places.items()}

    def _state_at(self, place: SavedAt, drawn: bool) -> Tensor:
        """Return the state of a default generator at a place that was passed."""
        device, position = place
        if drawn and position in self._saved:
            generator = self._generators.standing_for(device)
            if generator is not None and generator.device.type == device.type:
                return self._saved[position][generator]
        return undrawn_state(self._recording, position, device)


def _places_gone_back_to(recording: Recording) -> Iterator[int]:
    for node in recording.nodes:
        if isinstance(node, Rewind):
            yield node.position
        elif isinstance(node, Mark) and node.tracked is not None:
            yield from (position for _, position in node.tracked.places.values())
    for kept in recording.kept:
        yield kept.position
    for tracked in recording.trackers:
        yield from (position for _, position in tracked.places.values())

"""Notice, while recording, when somebody seeds or rewinds a generator.

See [Note: Tokens in place of states] in `tokens.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.record.default_generators import default_generator, full_device
from deferred_init.record.events import GeneratorEvent, Reseed, Resume, Rewind
from deferred_init.record.graph import Recording
from deferred_init.record.kept_states import SharedStates, kept_states, origin_of
from deferred_init.record.nodes import Stream
from deferred_init.record.problems import RecordError, user_line
from deferred_init.record.tokens import Tokens, device_of, is_token_state, token_in
from deferred_init.record.trackers import (
    SavedAt,
    Tracked,
    copy_of,
    put_into,
    tracker_of,
)

__all__ = ["GeneratorWatch", "identity", "is_seeded_state", "stream_of"]

_CPU = torch.device("cpu")


def identity(generator: torch.Generator) -> int:
    """Return what tells generators apart: a dispatched one comes as a new object."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def is_seeded_state(state: Tensor, seed: int) -> bool:
    """Whether a CPU generator state is the one that `manual_seed(seed)` gives."""
    probe = torch.Generator()
    probe.manual_seed(seed)
    return torch.equal(probe.get_state(), state)


class GeneratorWatch:
    """Watches default generators and explicit ones during a recording.

    Of the default generators it watches the CPU's, that of the CUDA device that is
    constructed for or is current, and every one that is drawn from.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._defaults: dict[torch.device, Tokens] = {}
        self._explicit: dict[int, tuple[torch.Generator, Tokens, Tensor, Stream]] = {}
        self._shared = SharedStates()
        self._trackers: dict[int, Any] = {}
        self._num_events = 0
        self._defaults[_CPU] = Tokens(torch.default_generator, len(recording.nodes))
        if torch.cuda.is_initialized():
            self._begin(recording.device)
            self._begin(torch.device("cuda", torch.cuda.current_device()))

    def before_draw(self, device: torch.device | None) -> None:
        """Record what was done to default generators before a draw on a device."""
        self._begin(device or self._recording.device)
        for watched, tokens in self._defaults.items():
            if (token := tokens.now()) != tokens.token:
                self._note(watched, tokens, token)

    def after_draw(self, stream: Stream) -> None:
        """Give the generator that was drawn from a new token."""
        position = len(self._recording.nodes)
        if stream.generator is not None:
            self._explicit[identity(stream.generator)][1].renew(position)
            return
        # Whose the numbers of the default device are is known when they are replayed.
        for watched, tokens in self._defaults.items():
            if stream.device is None or watched == full_device(stream.device):
                tokens.renew(position)

    def before_mark(self, module: nn.Module) -> Tracked | None:
        """Return what a module that defers itself will find in its tracker.

        Also a state that no recorded code has touched is given a token: it is not what
        it was when those draw from it who come after the module.
        """
        self.before_draw(None)
        tracker = tracker_of(module)
        if tracker is None:
            return None
        self._trackers[id(tracker)] = tracker
        put_into(tracker, dict(self._forked(tracker)))
        return self._tracked(tracker)

    def after_mark(self) -> None:
        """Give the generators new tokens: the module may draw from any."""
        for tokens in self._defaults.values():
            tokens.renew(len(self._recording.nodes))

    def close(self) -> None:
        """Record what the constructor left, and put the generators back."""
        try:
            self.before_draw(None)
            if self._num_events:
                tracked = [_generators_in(each) for each in self._trackers.values()]
                holders = [*self._shared.found, *chain.from_iterable(tracked)]
                self._recording.kept = kept_states(self._defaults, holders)
            found = [self._tracked(each) for each in self._trackers.values()]
            self._recording.trackers = tuple(each for each in found if each)
        finally:
            torch.default_generator.set_state(self._recording.cpu_start)
            for generator, _, state, _ in self._explicit.values():
                generator.set_state(state)

    def _tracked(self, tracker: Any) -> Tracked | None:
        """Return what the tokens in a tracker stand for, if it has any."""
        places: dict[str, SavedAt] = {}
        for name, held in tracker.get_states().items():
            state = copy_of(held)
            token = None if device_of(state) is None else token_in(state)
            for device, tokens in self._defaults.items():
                if token in tokens.positions:
                    places[name] = (device, tokens.positions[token])
        return Tracked(tracker=tracker, places=places) if places else None

    def _forked(self, tracker: Any) -> Iterator[tuple[str, Tensor]]:
        """Fork states of a tracker that hold no token, and yield what is saved."""
        for name, held in tracker.get_states().items():
            state = copy_of(held)
            device = device_of(state)
            tokens = None if device is None else self._defaults.get(device)
            if device is None or tokens is None or token_in(state) in tokens.positions:
                continue
            generator = default_generator(device)
            outer = generator.get_state()
            generator.set_state(state)
            self._note(device, tokens, tokens.now())
            yield name, generator.get_state()
            generator.set_state(outer)
            self._note(device, tokens, tokens.now())

    def _begin(self, device: torch.device) -> None:
        """Begin to watch the generator of a CUDA device, where CUDA is running."""
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return
        device = full_device(device)
        if device in self._defaults:
            return
        recording, index = self._recording, device.index
        generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        nodes = recording.nodes
        if not torch.equal(recording.cuda_starts.setdefault(index, state), state):
            nodes.append(Reseed(len(nodes), device, state, None))
        recording.watched[index] = len(nodes)
        self._shared.begin(generator)
        self._defaults[device] = Tokens(generator, len(nodes))

    def _note(self, device: torch.device, tokens: Tokens, token: int | None) -> None:
        """Record one thing that was done to a default generator."""
        nodes = self._recording.nodes
        index = len(nodes)
        generator = default_generator(device)
        earlier = None if token is None else tokens.positions.get(token)
        event: GeneratorEvent
        if earlier is not None:
            event = Rewind(index, device, earlier)
        elif token is not None and (origin := origin_of(token)) is not None:
            event = Resume(index, device, *origin)
        else:
            state, seed = _state_of(generator), generator.initial_seed()
            on_cpu = device.type == "cpu"
            known = seed if on_cpu and is_seeded_state(state, seed) else None
            event = Reseed(index, device, state, known)
        nodes.append(event)
        self._num_events += 1
        if device.type == "cuda":
            self._shared.look(generator)
        tokens.renew(len(nodes))

    def explicit(self, generator: torch.Generator) -> Stream:
        """Return the stream of an explicit generator, a new one after a reseed."""
        entry = self._explicit.get(identity(generator))
        if entry is not None:
            _, tokens, _, stream = entry
            token = tokens.now()
            if token == tokens.token:
                return stream
            if token in tokens.positions:
                raise RecordError(
                    "a constructor put an explicit torch.Generator back to a state "
                    "that it had saved after drawing from it; this cannot be "
                    "recorded: seed the generator again with manual_seed instead"
                )
        state = _state_of(generator)
        stream = Stream(generator.device, generator, state)
        tokens = Tokens(generator, 0)
        self._explicit[identity(generator)] = (generator, tokens, state, stream)
        self._recording.streams[stream] = stream
        return stream


def _generators_in(tracker: Any) -> list[torch.Generator]:
    held = tracker.get_states().values()
    return [state for state in held if isinstance(state, torch.Generator)]


def _state_of(generator: torch.Generator) -> Tensor:
    """Return a state that is none of another generator while that is recorded."""
    state = generator.get_state()
    if is_token_state(state):
        raise RecordError(
            f"at {user_line()} a generator has the state of another one, from which "
            "the constructor draws; this cannot be recorded: seed each of them with "
            "`manual_seed` instead"
        )
    return state


def stream_of(recording: Recording, generator: torch.Generator) -> Stream:
    """Return the stream of an explicit generator, in or after the constructor."""
    if recording.watch is not None:
        stream: Stream = recording.watch.explicit(generator)
        return stream
    key = ("explicit", identity(generator))
    known = recording.streams.get(key)
    state = generator.get_state()
    if known is not None and torch.equal(_seen(known), state):
        return known
    known = Stream(generator.device, generator, state)
    recording.streams[key] = known
    return known


def _seen(stream: Stream) -> Tensor:
    """State in which an explicit generator was left by the recording."""
    return torch.empty(0) if stream.start is None else stream.start

"""Notice, while recording, when somebody seeds or rewinds a generator.

See [Note: Tokens in place of states] in `tokens.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Reseed, Rewind, Stream
from deferred_init.record.problems import RecordError, user_line
from deferred_init.record.tokens import Tokens, is_token_state

__all__ = ["GeneratorWatch", "identity", "is_seeded_state", "stream_of"]


def identity(generator: torch.Generator) -> int:
    """Return what tells generators apart: a dispatched one comes as a new object."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def is_seeded_state(state: Tensor, seed: int) -> bool:
    """Whether a CPU generator state is the one that `manual_seed(seed)` gives."""
    probe = torch.Generator()
    probe.manual_seed(seed)
    return torch.equal(probe.get_state(), state)


class GeneratorWatch:
    """Watches the CPU's default generator and explicit ones during a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._default = Tokens(torch.default_generator, len(recording.nodes))
        self._explicit: dict[int, tuple[torch.Generator, Tokens, Tensor, Stream]] = {}

    def before_draw(self) -> None:
        """Record a reseed or a rewind of the default generator, if there was one."""
        tokens = self._default
        token = tokens.now()
        if token == tokens.token:
            return
        nodes = self._recording.nodes
        position = None if token is None else tokens.positions.get(token)
        if position is None:
            generator = torch.default_generator
            state, seed = _state_of(generator), generator.initial_seed()
            known = seed if is_seeded_state(state, seed) else None
            nodes.append(Reseed(len(nodes), state, known))
        else:
            nodes.append(Rewind(len(nodes), position))
        tokens.renew(len(nodes))

    def after_draw(self, stream: Stream) -> None:
        """Give the generator that was drawn from a new token."""
        position = len(self._recording.nodes)
        if stream.generator is None:
            self._default.renew(position)
        else:
            tokens = self._explicit[identity(stream.generator)][1]
            tokens.renew(position)

    def close(self) -> None:
        """Record what the constructor left, and put the generators back."""
        try:
            self.before_draw()
        finally:
            torch.default_generator.set_state(self._recording.cpu_start)
            for generator, _, state, _ in self._explicit.values():
                generator.set_state(state)

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

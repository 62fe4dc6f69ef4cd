"""Notice, while recording, when somebody seeds or rewinds a generator.

[Note: Tokens in place of states]
Nothing is drawn while a constructor is recorded, so the default generator stays
where it was, and seeding it twice with one seed would leave no trace. So the
generator holds a token meanwhile: a seed that nobody else uses, another one after
every recorded draw. A seed that is no token was set by the constructor; an older
token means that a saved state was put back (`fork_rng`, `set_rng_state`).
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Reseed, Rewind, Stream
from deferred_init.record.problems import RecordError

__all__ = ["GeneratorWatch", "identity", "is_seeded_state", "stream_of"]


def identity(generator: torch.Generator) -> int:
    """Return what tells generators apart: a dispatched one comes as a new object."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def is_seeded_state(state: Tensor, seed: int) -> bool:
    """Whether a CPU generator state is the one that `manual_seed(seed)` gives."""
    probe = torch.Generator()
    probe.manual_seed(seed)
    return torch.equal(probe.get_state(), state)


class _Tokens:
    """The tokens of one generator and what each of them stands for."""

    __slots__ = ("positions", "token")

    def __init__(self, generator: torch.Generator, position: int) -> None:
        self.token = 0
        self.positions: dict[int, int] = {}
        self.renew(generator, position)

    def renew(self, generator: torch.Generator, position: int) -> None:
        """Give the generator a new token, which stands for `position`."""
        if not self.token:
            self.token = secrets.randbits(61) + (1 << 61)
        else:
            self.token += 1
        generator.manual_seed(self.token)
        self.positions[self.token] = position


class GeneratorWatch:
    """Watches the CPU's default generator and explicit ones during a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._default = _Tokens(torch.default_generator, len(recording.nodes))
        self._explicit: dict[int, tuple[torch.Generator, _Tokens, Tensor, Stream]] = {}

    def before_draw(self) -> None:
        """Record a reseed or a rewind of the default generator, if there was one."""
        generator = torch.default_generator
        seed = generator.initial_seed()
        tokens = self._default
        if seed == tokens.token:
            return
        nodes = self._recording.nodes
        position = tokens.positions.get(seed)
        if position is None:
            state = generator.get_state()
            known = seed if is_seeded_state(state, seed) else None
            nodes.append(Reseed(len(nodes), state, known))
        else:
            nodes.append(Rewind(len(nodes), position))
        tokens.renew(generator, len(nodes))

    def after_draw(self, stream: Stream) -> None:
        """Give the generator that was drawn from a new token."""
        position = len(self._recording.nodes)
        if stream.generator is None:
            self._default.renew(torch.default_generator, position)
        else:
            tokens = self._explicit[identity(stream.generator)][1]
            tokens.renew(stream.generator, position)

    def close(self) -> None:
        """Record what the constructor left, and put the generators back."""
        self.before_draw()
        torch.default_generator.set_state(self._recording.cpu_start)
        for generator, _, state, _ in self._explicit.values():
            generator.set_state(state)

    def explicit(self, generator: torch.Generator) -> Stream:
        """Return the stream of an explicit generator, a new one after a reseed."""
        entry = self._explicit.get(identity(generator))
        if entry is not None:
            _, tokens, _, stream = entry
            seed = generator.initial_seed()
            if seed == tokens.token:
                return stream
            if seed in tokens.positions:
                raise RecordError(
                    "a constructor put an explicit torch.Generator back to a state "
                    "that it had saved after drawing from it; this cannot be "
                    "recorded: seed the generator again with manual_seed instead"
                )
        state = generator.get_state()
        stream = Stream(generator.device, generator, state)
        tokens = _Tokens(generator, 0)
        self._explicit[identity(generator)] = (generator, tokens, state, stream)
        self._recording.streams[stream] = stream
        return stream


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

"""The real generators behind the streams of a recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Reseed, Stream
from deferred_init.record.paused import index_of
from deferred_init.record.starts import forget_start
from deferred_init.record.watch import identity

__all__ = ["Generators", "default_generator", "seeded_state"]


def seeded_state(generator: torch.Generator, event: Reseed) -> Tensor | None:
    """Return the state that a reseed gives a generator, `None` if it is unaffected."""
    if generator.device.type == "cpu":
        return event.state
    if event.seed is None:
        return None
    probe = torch.Generator(generator.device)
    probe.manual_seed(event.seed)
    return probe.get_state()


class Generators:
    """The real generators that a replay on one device draws from.

    Args:
        recording: The recording whose streams they stand for.
        device: The device of the replay.
    """

    def __init__(self, recording: Recording, device: torch.device) -> None:
        forget_start()
        self._recording = recording
        self._device = device
        self._private: dict[Stream, torch.Generator] = {}

    def of(self, stream: Stream) -> torch.Generator:
        """Return the generator of a stream."""
        if stream.generator is None:
            return default_generator(stream.device or self._device)
        known = self._private.get(stream)
        if known is None:
            device = stream.generator.device
            known = self._private[stream] = torch.Generator(device)
        return known

    def start(self, stream: Stream) -> Tensor:
        """Return the state in which a stream began."""
        if stream.start is not None:
            return stream.start
        return self._start_of(self.of(stream))

    def defaults(self) -> dict[torch.Generator, Tensor]:
        """Return the default generators that recorded events concern, with starts.

        Beside those that the recording draws from, these are the CPU's and, where
        CUDA was running, CUDA's: `torch.manual_seed` in a constructor sets them all.
        """
        streams = [self._recording.default_stream, *self._recording.streams.values()]
        found = {self.of(s): None for s in streams if s.generator is None}
        found[torch.default_generator] = None
        for index in self._recording.cuda_starts:
            found[default_generator(torch.device("cuda", index or 0))] = None
        return {generator: self._start_of(generator) for generator in found}

    def states(self) -> dict[torch.Generator, Tensor]:
        """Return the present states of the same generators."""
        return {generator: generator.get_state() for generator in self.defaults()}

    def untouched(self, generator: torch.Generator, state: Tensor) -> bool:
        """Whether a state is the one in which the recording left a generator."""
        if generator.device.type == "cpu":
            return torch.equal(state, self._recording.cpu_seen)
        start = self._recording.cuda_starts.get(generator.device.index)
        return start is None or torch.equal(state, start)

    def settle_explicit(self) -> None:
        """Bring the caller's own generators where eager would have left them."""
        latest = {
            identity(stream.generator): (stream.generator, stream)
            for stream in self._recording.streams.values()
            if stream.generator is not None
        }
        for generator, stream in latest.values():
            here = generator.get_state()
            if stream.start is not None and torch.equal(here, stream.start):
                generator.set_state(self.of(stream).get_state())

    def _start_of(self, generator: torch.Generator) -> Tensor:
        """Return the state in which a default generator began."""
        if generator.device.type == "cpu":
            return self._recording.cpu_start
        start = self._recording.cuda_starts.get(generator.device.index)
        if start is None:
            start = generator.get_state()
            self._recording.cuda_starts[generator.device.index] = start
        return start


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if device.type == "cuda":
        torch.cuda.init()
    index = index_of(device)
    if index is None:
        index = module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator

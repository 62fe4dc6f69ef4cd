"""The real generators behind the streams of a recording."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.default_generators import default_generator, full_device
from deferred_init.record.events import GeneratorEvent, Reseed
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Stream
from deferred_init.record.starts import forget_start
from deferred_init.record.watch import identity

__all__ = ["Generators", "seeded_state"]


def seeded_state(generator: torch.Generator, event: Reseed) -> Tensor | None:
    """Return the state that a reseed gives a generator, `None` if it is unaffected."""
    if generator.device.type == event.device.type:
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

    def concerns(self, event: GeneratorEvent, generator: torch.Generator) -> bool:
        """Whether an event of the recording is one of a default generator.

        What was done to the CPU's stands for all that were not watched then:
        `torch.manual_seed` and `fork_rng` reach them all. What was done to that of the
        device that was constructed for holds for the device of the replay.
        """
        recording, device = self._recording, generator.device
        if device.type == "cpu" or event.device.type == "cpu":
            if device.type == event.device.type:
                return True
            watched = recording.watched.get(self._as_recorded(device).index)
            on_cpu = event.device.type == "cpu"
            return on_cpu and (watched is None or event.index < watched)
        return self._as_recorded(device) == event.device

    def standing_for(self, device: torch.device) -> torch.Generator | None:
        """Return the generator that stands for that of a recorded device."""
        believed = self._recording.device
        if device.type == "cpu":
            return torch.default_generator
        if believed.type == "cuda" and full_device(believed) == device:
            device = self._device
        return default_generator(device) if device.type == "cuda" else None

    def _as_recorded(self, device: torch.device) -> torch.device:
        """Return the device that one of the replay stands for."""
        believed = self._recording.device
        same = device == self._device and device.type == believed.type
        return full_device(believed) if same else device

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

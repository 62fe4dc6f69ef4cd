"""Nodes for what a constructor did to default generators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deferred_init.record.nodes import Node, nothing

if TYPE_CHECKING:
    from deferred_init.record.graph import Recording

__all__ = ["GeneratorEvent", "Reseed", "Resume", "Rewind"]


class GeneratorEvent(Node):
    """A default generator was given another state.

    Attributes:
        device: The device whose default generator it is.
    """

    __slots__ = ("device",)

    def __init__(self, index: int, device: torch.device) -> None:
        super().__init__(index, nothing, (), None)
        self.device = device


class Reseed(GeneratorEvent):
    """It was given a new state.

    Attributes:
        state: That state.
        seed: The seed, if `state` is what seeding the CPU's generator gives; then other
            devices were seeded with it too.
    """

    __slots__ = ("seed", "state")

    def __init__(
        self, index: int, device: torch.device, state: Tensor, seed: int | None
    ) -> None:
        super().__init__(index, device)
        self.state = state
        self.seed = seed


class Rewind(GeneratorEvent):
    """It was put back to where it was at an earlier place of the recording.

    Attributes:
        position: Index of the first node after that place.
    """

    __slots__ = ("position",)

    def __init__(self, index: int, device: torch.device, position: int) -> None:
        super().__init__(index, device)
        self.position = position


class Resume(GeneratorEvent):
    """It was put where an earlier recording had left it.

    Attributes:
        recording: The earlier one.
        position: Index of the first node of that one after the place.
    """

    __slots__ = ("position", "recording")

    def __init__(
        self, index: int, device: torch.device, recording: Recording, position: int
    ) -> None:
        super().__init__(index, device)
        self.recording = recording
        self.position = position

"""Generator states at the places of a recording that a constructor went back to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deferred_init.record.generators import seeded_state
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Reseed, Rewind

__all__ = ["Rewinds"]


class Rewinds:
    """Saves states where a later rewind of the recording will need them."""

    def __init__(self, recording: Recording) -> None:
        self._positions = {
            node.position for node in recording.nodes if isinstance(node, Rewind)
        }
        self._saved: dict[int, dict[torch.Generator, Tensor]] = {}

    def passing(self, position: int, generators: Iterable[torch.Generator]) -> None:
        """Keep the states at a place, if a rewind goes back to it."""
        if position in self._positions:
            self._saved[position] = {g: g.get_state() for g in generators}

    def apply(
        self, node: Reseed | Rewind, generators: Iterable[torch.Generator]
    ) -> None:
        """Do to the default generators what the constructor did."""
        for generator in generators:
            if isinstance(node, Rewind):
                generator.set_state(self._saved[node.position][generator])
                continue
            state = seeded_state(generator, node)
            if state is not None:
                generator.set_state(state)

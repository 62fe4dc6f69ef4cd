"""Generator states along a recording, so that any node can draw alone.

[Note: What out-of-order draws cost]
A CUDA generator's state is a seed and an offset; a CPU generator's is 5 KB. To learn
the state before a random node the draws before it are made once and thrown away; the
states met on the way are kept at every 2**18 drawn elements, so they take at most
5 KB per MB drawn, and a later request walks at most 2**18 elements further back than
one node.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deferred_init.record.events import GeneratorEvent, Reseed, Resume, Rewind
from deferred_init.record.foreign import state_elsewhere
from deferred_init.record.generators import seeded_state
from deferred_init.record.nodes import Node, Stream

if TYPE_CHECKING:
    from deferred_init.record.replay import Replay

__all__ = ["Timeline"]

_CHECKPOINT_ELEMENTS = 1 << 18


class Timeline:
    """States of one generator before the nodes of a recording.

    Args:
        replay: Runs nodes of the recording for their draws alone.
        stream: A stream of the generator.
    """

    def __init__(self, replay: Replay, stream: Stream) -> None:
        self._replay = replay
        self._stream = stream
        self._generator = replay.generators.of(stream)
        self._positions: list[int] = [0]
        self._states: list[Tensor] = [replay.generators.start(stream)]
        # Where the last walk ended, with the numbers drawn since a kept state.
        self._recent: tuple[int, Tensor, int] = (0, self._states[0], 0)

    def before(self, index: int) -> Tensor:
        """Return the generator's state before the node at `index`."""
        position, state, drawn = self._nearest(index)
        generator = self._generator
        replay = self._replay
        nodes = replay.recording.nodes
        dirty = False
        while position < index:
            node = nodes[position]
            position += 1
            if isinstance(node, GeneratorEvent):
                if self._is_concerned(node):
                    state = self._jump(node, state if not dirty else None)
                    dirty, drawn = False, 0
                    self._keep(position, state)
                continue
            if not self._draws_here(node):
                continue
            if not dirty:
                generator.set_state(state)
            replay.draw_only(node)
            dirty = True
            drawn += _elements(node)
            if drawn >= _CHECKPOINT_ELEMENTS:
                state, dirty, drawn = generator.get_state(), False, 0
                self._keep(position, state)
        replay.free_scratch()
        if dirty:
            state = generator.get_state()
        self._recent = (index, state, drawn)
        return state

    def after(self, node: Node, generator: torch.Generator) -> None:
        """Note the generator's state after a node that was run, not only drawn."""
        position, _, drawn = self._recent
        if position != node.index:
            return
        state, drawn = generator.get_state(), drawn + _elements(node)
        if drawn >= _CHECKPOINT_ELEMENTS:
            drawn = 0
            self._keep(position + 1, state)
        self._recent = (position + 1, state, drawn)

    def _nearest(self, index: int) -> tuple[int, Tensor, int]:
        """Return the last known place not after `index`, its state, numbers since."""
        at = bisect_right(self._positions, index) - 1
        if self._positions[at] < self._recent[0] <= index:
            return self._recent
        return self._positions[at], self._states[at], 0

    def _draws_here(self, node: Node) -> bool:
        """Whether a node draws from this timeline's generator."""
        stream = node.stream
        if stream is None:
            return False
        if stream is self._stream:
            return True
        return self._replay.generators.of(stream) is self._generator

    def _is_concerned(self, event: GeneratorEvent) -> bool:
        of_a_default = self._stream.generator is None
        return of_a_default and self._replay.generators.concerns(event, self._generator)

    def _jump(self, node: GeneratorEvent, state: Tensor | None) -> Tensor:
        """Return the state after what was done to the generator."""
        if isinstance(node, Rewind):
            return self.before(node.position)
        if isinstance(node, Resume):
            return state_elsewhere(type(self._replay), node)
        assert isinstance(node, Reseed)
        seeded = seeded_state(self._generator, node)
        if seeded is not None:
            return seeded
        return self._generator.get_state() if state is None else state

    def _keep(self, position: int, state: Tensor) -> None:
        """Keep a state, unless one for that place is known."""
        at = bisect_right(self._positions, position)
        if self._positions[at - 1] != position:
            self._positions.insert(at, position)
            self._states.insert(at, state)


def _elements(node: Node) -> int:
    """How many numbers a node draws, roughly."""
    if node.outs and node.outs[0] is not None:
        return node.outs[0].meta.numel()
    return sum(value.meta.numel() for value in node.reads[:1])

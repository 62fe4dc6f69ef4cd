"""Which nodes are needed for some values, and when a value is used last."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import NamedTuple

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Node, Storage, Value

__all__ = ["Needs", "all_needs", "needs_of"]


class Needs(NamedTuple):
    """What a replay has to run for some values.

    Attributes:
        nodes: The nodes that have to be run, in recorded order.
        last: For a node, the values that nothing later uses and nobody wants.
        ready: For a node, the wanted values whose storage nothing later touches.
    """

    nodes: list[Node]
    last: dict[int, list[Value]]
    ready: dict[int, list[Value]]


class _Walk:
    """A walk backwards over a recording that collects what some values depend on.

    Attributes:
        live: Values that a later node uses or somebody wants.
        contents: Storages whose contents matter to what comes later.
    """

    def __init__(self, wanted: Collection[Value]) -> None:
        self.live: set[Value] = set(wanted)
        self.contents: set[Storage] = {value.storage for value in wanted}
        self.needs = Needs([], {}, {})
        self._used: set[Value] = set(wanted)
        self._pending: dict[Storage, list[Value]] = {}
        for value in wanted:
            self._pending.setdefault(value.storage, []).append(value)

    def is_needed(self, node: Node) -> bool:
        """Whether a node made a live value or wrote to a storage that matters."""
        live = self.live
        for out in node.outs:
            if out is not None and out in live:
                return True
        contents = self.contents
        for storage in node.writes:  # noqa: SIM110 - asked of every node
            if storage in contents:
                return True
        return False

    def take(self, node: Node) -> list[Value]:
        """Note a needed node and return the values that it reads."""
        needs = self.needs
        needs.nodes.append(node)
        overwritten = node.overwrites
        if overwritten is not None and _hides_writes(overwritten, node):
            self.contents.discard(overwritten.storage)
        reads = node.reads
        for value in reads:
            self.live.add(value)
            if value is not overwritten:
                self.contents.add(value.storage)
        self._note_last([*(out for out in node.outs if out is not None), *reads], node)
        return reads

    def _note_last(self, touched: list[Value], node: Node) -> None:
        """Note what this node is the last to use, and whose storage to touch."""
        used, pending = self._used, self._pending
        done: list[Value] = []
        ready: list[Value] = []
        for value in touched:
            if value not in used:
                used.add(value)
                done.append(value)
            if value.storage in pending:
                ready += pending.pop(value.storage)
        if done:
            self.needs.last[node.index] = done
        if ready:
            self.needs.ready[node.index] = ready


def all_needs(recording: Recording, wanted: Collection[Value], end: int) -> Needs:
    """Find what many values need, by walking all nodes before `end`."""
    walk = _Walk(wanted)
    for node in reversed(recording.nodes[:end]):
        if walk.is_needed(node):
            walk.take(node)
    walk.needs.nodes.reverse()
    return walk.needs


def needs_of(recording: Recording, wanted: Collection[Value], end: int) -> Needs:
    """Find what few values need, by visiting only nodes that may matter."""
    walk = _Walk(wanted)
    nodes = recording.nodes
    heap: list[int] = []
    queued: set[int] = set()

    def consider(index: int) -> None:
        if index not in queued:
            queued.add(index)
            heapq.heappush(heap, -index)

    for value in wanted:
        for index in _origins(value, end):
            consider(index)
    while heap:
        node = nodes[-heapq.heappop(heap)]
        for storage in node.writes:
            before = _last_writer(storage, node.index)
            if before is not None:
                consider(before)
        if walk.is_needed(node):
            for value in walk.take(node):
                for index in _origins(value, node.index):
                    consider(index)
    walk.needs.nodes.reverse()
    return walk.needs


def _hides_writes(overwritten: Value, node: Node) -> bool:
    """Whether what was written to a storage before does not matter any more.

    Nothing was, if the node is the first after the one that made the storage.
    """
    earlier = overwritten.storage.writers[:2]
    return node.index not in earlier and overwritten.covers_storage()


def _origins(value: Value, end: int) -> Iterator[int]:
    """Yield the node that made a value and the last one that wrote to its storage."""
    yield value.node
    last = _last_writer(value.storage, end)
    if last is not None:
        yield last


def _last_writer(storage: Storage, end: int) -> int | None:
    """Return the last node before `end` that wrote to a storage."""
    at = bisect_left(storage.writers, end)
    return storage.writers[at - 1] if at else None

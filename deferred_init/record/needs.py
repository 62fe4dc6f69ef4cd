"""Which nodes are needed for some values, and when a value is used last."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from deferred_init.record.graph import Node, Recording, Storage, Value

__all__ = ["Needs", "needed_nodes"]


class Needs(NamedTuple):
    """What a replay has to run for some values.

    Attributes:
        needed: One byte per node, 1 if it has to be run.
        last: For a node, the values that nothing later uses and nobody wants.
        ready: For a node, the wanted values whose storage nothing later touches.
    """

    needed: bytearray
    last: dict[int, list[Value]]
    ready: dict[int, list[Value]]


def needed_nodes(recording: Recording, wanted: Collection[Value], end: int) -> Needs:
    """Walk the recording backwards from `end` and mark what `wanted` depends on.

    Args:
        recording: The recording.
        wanted: The values to be computed.
        end: Only nodes before this index count.

    Returns:
        What has to be run, and when values can be let go of or handed over.
    """
    nodes = recording.nodes
    needed = bytearray(end)
    live: set[Value] = set(wanted)
    contents: set[Storage] = {value.storage for value in wanted}
    last: dict[int, list[Value]] = {}
    ready: dict[int, list[Value]] = {}
    pending: dict[Storage, list[Value]] = {}
    for value in wanted:
        pending.setdefault(value.storage, []).append(value)
    used: set[Value] = set(wanted)
    for index in range(end - 1, -1, -1):
        node = nodes[index]
        if not _is_needed(node, live, contents):
            continue
        needed[index] = 1
        overwritten = node.overwrites
        if overwritten is not None and overwritten.covers_storage():
            contents.discard(overwritten.storage)
        done = [out for out in node.outs if out is not None and out not in used]
        used.update(done)
        for value in node.reads:
            if value not in used:
                used.add(value)
                done.append(value)
            live.add(value)
            if value is not overwritten:
                contents.add(value.storage)
        if done:
            last[index] = done
        if pending:
            final = [v for s in _touched(node) for v in pending.pop(s, ())]
            if final:
                ready[index] = final
    return Needs(needed, last, ready)


def _touched(node: Node) -> list[Storage]:
    """Return the storages that a node makes, reads or writes."""
    found = [value.storage for value in node.reads]
    found.extend(out.storage for out in node.outs if out is not None)
    return found


def _is_needed(node: Node, live: set[Value], contents: set[Storage]) -> bool:
    """Whether a node made a live value or wrote to a storage that matters."""
    for out in node.outs:
        if out is not None and out in live:
            return True
    return any(storage in contents for storage in node.writes)

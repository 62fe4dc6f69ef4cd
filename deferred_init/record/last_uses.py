"""Where in a recording the memory of a value is touched for the last time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Storage, Value

__all__ = ["last_use"]

_last_uses: WeakKeyDictionary[Recording, tuple[int, dict[Storage, int]]]
_last_uses = WeakKeyDictionary()


def last_use(value: Value) -> tuple[int, int]:
    """Return the serial of the recording, and the index of the last node."""
    recording = value.recording
    num_nodes, uses = _last_uses.get(recording, (-1, {}))
    if num_nodes != len(recording.nodes):
        uses = {}
        for node in recording.nodes:
            for read in node.reads:
                uses[read.storage] = node.index
            for out in node.outs:
                if out is not None:
                    uses[out.storage] = node.index
            for storage in node.writes:
                uses[storage] = node.index
        _last_uses[recording] = (len(recording.nodes), uses)
    return recording.serial, uses.get(value.storage, value.node)

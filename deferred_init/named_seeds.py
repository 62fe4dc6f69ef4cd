"""Seeds for the random operations of a recording, by the tensors that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deferred_init import record
from deferred_init.rng import seed_for_name

__all__ = ["seed_by_name"]


def seed_by_name(
    recording: record.Recording, names: Mapping[record.Value, str], seed: int | None
) -> Callable[[record.Node], int]:
    """Return a function that seeds each random node by the tensor it is for.

    One walk backwards finds out which: what a node reads is for whatever it writes.

    Args:
        recording: The recording.
        names: Canonical names of the wanted values.
        seed: The job's seed; see `rng.seed_for_name`.
    """
    assert seed is not None, "checked by the verb"
    known: dict[record.Storage, str] = {}
    for value, name in names.items():
        known.setdefault(value.storage, name)
    for node in reversed(recording.nodes):
        name = _name_of(node, known)
        if name:
            for read in node.reads:
                known.setdefault(read.storage, name)
    counts: dict[str, int] = {}

    def seed_of(node: record.Node) -> int:
        name = _name_of(node, known)
        counts[name] = counts.get(name, -1) + 1
        return seed_for_name(seed, name, counts[name])

    return seed_of


def _name_of(node: record.Node, known: Mapping[record.Storage, str]) -> str:
    made = [out.storage for out in node.outs if out is not None]
    return next((known[key] for key in (*node.writes, *made) if key in known), "")

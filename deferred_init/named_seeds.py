"""How the random operations of a recording are run, by the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deferred_init import record
from deferred_init.fast.fill import fillable, writer
from deferred_init.fast.philox import stream_key
from deferred_init.fast.policy import distribution_of
from deferred_init.handlers.claims import Request
from deferred_init.rng import BY_NAME, seed_for_name
from deferred_init.slots import Slot
from deferred_init.tensor_names import names_for

__all__ = ["draws_for"]

Name = Callable[[record.Node], tuple[str, int]]


def draws_for(
    recording: record.Recording,
    wanted: Mapping[record.Value, Slot],
    request: Request,
) -> record.BeforeRandom | None:
    """Return what a replay asks before every random node.

    Args:
        recording: The recording.
        wanted: The wanted values, each with a slot that it is for.
        request: What the caller asked for.

    Returns:
        A function of the node; None where a running generator draws all of them.
    """
    if request.rng in BY_NAME:
        known = names_for(request)
        names = {value: known.of(slot) for value, slot in wanted.items()}
        return _draws_by_name(recording, names, request.seed, request.rng)
    return None if request.draws_unneeded else _no_seed


def _no_seed(node: record.Node) -> None:
    """Seed nothing; that a replay asks at all lets it leave out what nobody needs."""


def _draws_by_name(
    recording: record.Recording,
    names: Mapping[record.Value, str],
    seed: int | None,
    policy: str,
) -> record.BeforeRandom:
    """Return what gives each random node a seed, or what fills its tensor.

    Args:
        recording: The recording.
        names: Canonical names of the wanted values.
        seed: The job's seed; see `rng.seed_for_name`.
        policy: `"by_name"` or `"fast"`.
    """
    assert seed is not None, "checked by the verb"
    name_of = _names_of(recording, names)

    def draw(node: record.Node) -> int | Callable[..., Any]:
        name, ordinal = name_of(node)
        if policy == "fast":
            filling = _filling(node, seed, name, ordinal)
            if filling is not None:
                return filling
        return seed_for_name(seed, name, ordinal)

    return draw


def _filling(
    node: record.Node, seed: int, name: str, ordinal: int
) -> record.Filling | None:
    """Return what fills the tensor of a node, if it fills all of one."""
    value, stream = node.overwrites, node.stream
    if value is None or (stream is not None and stream.generator is not None):
        return None
    kwargs = {k: v for k, v in (node.kwargs or {}).items() if v is not None}
    wanted = distribution_of(node.call, tuple(node.args[1:]), kwargs)
    if wanted is None or not fillable(value.meta, wanted):
        return None
    return record.Filling(writer(wanted, stream_key(seed, name, ordinal)))


def _names_of(recording: record.Recording, names: Mapping[record.Value, str]) -> Name:
    """Return a function that names each random node and counts those of a name.

    One walk backwards finds out which: what a node reads is for whatever it writes.
    """
    known: dict[record.Storage, str] = {}
    for value, name in names.items():
        known.setdefault(value.storage, name)
    for node in reversed(recording.nodes):
        name = _name_of(node, known)
        if name:
            for read in node.reads:
                known.setdefault(read.storage, name)
    counts: dict[str, int] = {}

    def name_of(node: record.Node) -> tuple[str, int]:
        name = _name_of(node, known)
        counts[name] = counts.get(name, -1) + 1
        return name, counts[name]

    return name_of


def _name_of(node: record.Node, known: Mapping[record.Storage, str]) -> str:
    made = [out.storage for out in node.outs if out is not None]
    return next((known[key] for key in (*node.writes, *made) if key in known), "")

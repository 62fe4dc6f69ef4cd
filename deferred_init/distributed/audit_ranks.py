"""Detectors for sharded models: what ranks and their wrappers hold.

Those that compare ranks run under `verify="full"` only, because then every rank that
holds a part of the model has to run the audit. Each hears the same findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deferred_init.aliases import is_deferred
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.distributed.checksum import Checksum, checksum, dense_part
from deferred_init.distributed.fsdp2 import fsdp_groups, name_of, split_ties
from deferred_init.distributed.rendezvous import (
    Meeting,
    RanksFailed,
    RanksMissing,
    spell_ranks,
)
from deferred_init.handlers.dtensor import region_on_this_rank
from deferred_init.report import Finding

__all__: list[str] = []

_TIMEOUT_S = 300.0
_MIN_ELEMENTS = 8
"""Shards of fewer elements may be alike by chance, or because they are all ones."""

Part = tuple[str, Checksum]


@register_detector
def stale_in_fsdp(scene: Scene) -> Iterator[Finding]:
    """Find parameters that FSDP2 trains while the module holds another one."""
    groups = list(fsdp_groups(found.module for found in scene.graph.modules))
    if not groups:
        return
    names = {id(found.module): found.fqn for found in scene.graph.modules}
    for group in groups:
        if not group.is_sharded:
            continue  # the modules hold the gathered parameters meanwhile
        for param in group.fsdp_params:
            info = param._module_info
            held = info.module._parameters.get(info.param_name)
            if held is not param.sharded_param:
                # Before its first forward FSDP2 looks once more at its modules.
                noticed = not group._reset_sharded_params and isinstance(held, DTensor)
                yield Finding(
                    code="wrapper-stale",
                    fqn=name_of(param, names),
                    message="expected FSDP2 to hold the module's parameter, found that "
                    "it holds another object, with which it computes; give the old "
                    "object new contents, or shard after the replacement",
                    severity="warning" if noticed else "error",
                )
            elif not _gathers_from(param, held):
                yield Finding(
                    code="wrapper-stale",
                    fqn=name_of(param, names),
                    message="expected FSDP2 to gather from the parameter's memory, "
                    "found that it gathers from other memory, which an optimizer "
                    "does not change; call `reset_sharded_param()` on its record",
                )


@register_detector
def tie_across_groups(scene: Scene) -> Iterator[Finding]:
    """Find one tensor that FSDP2 manages as two, in two groups."""
    modules = [(found.fqn, found.module) for found in scene.graph.modules]
    for names in split_ties(modules):
        yield Finding(
            code="tie-across-groups",
            fqn=names[0],
            message="expected one parameter, found that FSDP2 manages it apart as "
            f"{', '.join(f'`{name}`' for name in names[1:])}, in another group; shard "
            "the modules that share it in one call, `fully_shard([first, second])`",
        )


@register_detector
def ranks_compared(scene: Scene) -> Iterator[Finding]:
    """Find replicas that differ and shards that are alike, by their checksums."""
    ranks = _ranks_of(scene)
    if not scene.full or not ranks:
        return
    try:
        meeting = Meeting(ranks, _TIMEOUT_S, 'the audit with `verify="full"`')
        found = meeting.decide(_parts(scene), _judge)
    except (RanksFailed, RanksMissing) as error:
        if isinstance(error, RanksFailed) and scene.expected is not None:
            raise  # this is the audit of `materialize`, which has to be undone
        found = [("ranks-missing", "", str(error))]
    for code, fqn, message in found:
        yield Finding(code=code, fqn=fqn, message=message)


def _gathers_from(param: Any, held: Tensor) -> bool:
    flat = param._sharded_param_data
    local = held._local_tensor if isinstance(held, DTensor) else held
    if type(flat) is not Tensor or local.is_meta or not local.numel():
        return True
    return bool(flat.untyped_storage().data_ptr() == local.untyped_storage().data_ptr())


def _ranks_of(scene: Scene) -> tuple[int, ...]:
    """Return the ranks that hold parts of the model, if there are several."""
    if not dist.is_initialized() or "fake" in dist.get_backend():
        return ()
    ranks: set[int] = set()
    for place in scene.graph.places:
        if isinstance(place.tensor, DTensor):
            ranks.update(place.tensor.device_mesh.mesh.flatten().tolist())
    return tuple(sorted(ranks)) if len(ranks) > 1 and dist.get_rank() in ranks else ()


def _parts(scene: Scene) -> dict[str, Part]:
    """Return which part of each tensor is here, and its checksum."""
    parts: dict[str, Part] = {}
    for place in scene.graph.in_scope("model"):
        tensor = place.tensor
        if place.kind not in ("parameter", "buffer") or is_deferred(tensor):
            continue
        where = "all"
        if isinstance(tensor, DTensor):
            region = region_on_this_rank(tensor)
            if region is None:
                continue
            where = str(region.dims)
            tensor = tensor._local_tensor
        with torch.no_grad():
            if (data := dense_part(tensor)) is not None:
                parts[place.fqn] = (where, checksum(data))
    return parts


def _judge(answers: Mapping[int, Any]) -> list[tuple[str, str, str]]:
    found = []
    for name in dict.fromkeys(name for parts in answers.values() for name in parts):
        held: dict[str, dict[Checksum, list[int]]] = {}
        for rank, parts in answers.items():
            if name in parts:
                where, value = parts[name]
                held.setdefault(where, {}).setdefault(value, []).append(rank)
        for where, values in held.items():
            if len(values) > 1:
                sides = " and ".join(spell_ranks(ranks) for ranks in values.values())
                part = "the tensor" if where == "all" else f"the part {where}"
                found.append(
                    (
                        "replicas-differ",
                        name,
                        f"expected {part} to be equal on all ranks that hold it, found "
                        f"other bits on ranks {sides}; materialize on all ranks with "
                        "one seed, or broadcast it",
                    )
                )
        found += _alike(name, held)
    return found


def _alike(
    name: str, held: Mapping[str, Mapping[Checksum, list[int]]]
) -> Iterator[tuple[str, str, str]]:
    """Find parts at different places of a tensor that have the same bits."""
    seen: dict[Checksum, tuple[str, list[int]]] = {}
    for where, values in held.items():
        for value, ranks in values.items():
            if value.constant or value.num_elements < _MIN_ELEMENTS:
                continue
            other, its_ranks = seen.setdefault(value, (where, ranks))
            if other != where:
                yield (
                    "shards-alike",
                    name,
                    f"expected different values in the parts {other} and {where}, "
                    f"found the same on ranks {spell_ranks(its_ranks)} and "
                    f"{spell_ranks(ranks)}, as when every rank draws its shard with "
                    "the same seed; materialize, which slices the full value",
                )

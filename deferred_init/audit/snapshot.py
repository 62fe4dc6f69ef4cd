"""What a model was like before: what has to be the same afterwards.

A snapshot holds references and metadata, no contents, and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deferred_init.aliases import is_deferred, storage_key
from deferred_init.audit.graph import ModulePlace, ObjectGraph, Place, look
from deferred_init.audit.hooks import is_leaf
from deferred_init.audit.kinds import MODULE_HOOKS
from deferred_init.record.paused import no_function_modes

__all__ = [
    "TENSOR_HOOKS",
    "ModuleBefore",
    "Share",
    "Snapshot",
    "TensorBefore",
    "geometry",
    "shares_of",
    "take_snapshot",
    "tensor_hooks",
]

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Hooks = Mapping[str, tuple[Any, ...]]


class TensorBefore(NamedTuple):
    """One place of the models, as it was."""

    place: Place
    tensor: Tensor
    deferred: bool
    size: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    is_leaf: bool
    attributes: Mapping[str, Any]
    hooks: Hooks
    version: int | None
    storage: int | None


class ModuleBefore(NamedTuple):
    """One module of the models, as it was."""

    fqn: str
    module: nn.Module
    module_class: type
    training: bool
    transient: frozenset[str]
    attributes: tuple[str, ...]
    hooks: Hooks


class Share(NamedTuple):
    """One of several tensor objects over the same storage."""

    place: Place
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """What `take_snapshot` saw.

    Attributes:
        tensors: By qualified name, the places of the models.
        modules: The modules of the models.
        ties: Groups of names that held one and the same object.
        shares: Groups of different objects over one storage, one place for each.
        groups: For each optimizer and group, the names of its parameters; None for
            those that are not the models'.
        held: For places of holders that held a tensor of the models, its name.
    """

    tensors: Mapping[str, TensorBefore]
    modules: tuple[ModuleBefore, ...]
    ties: tuple[tuple[str, ...], ...]
    shares: tuple[tuple[Share, ...], ...]
    groups: tuple[tuple[tuple[str | None, ...], ...], ...]
    held: Mapping[str, str]


def take_snapshot(
    models: Iterable[nn.Module],
    *,
    optimizers: Sequence[Optimizer] = (),
    holders: Iterable[object] = (),
) -> Snapshot:
    """Note what the audit will compare with; changes nothing.

    Args:
        models: The models, before anything is done.
        optimizers: What holds their parameters.
        holders: What else does.
    """
    with no_function_modes():  # else each look at a subclass asks for its function
        return _snapshot_of(look(models, optimizers, holders), optimizers)


def _snapshot_of(graph: ObjectGraph, optimizers: Sequence[Optimizer]) -> Snapshot:
    tensors: dict[str, TensorBefore] = {}
    names: dict[int, list[str]] = {}
    storages: dict[int, dict[int, Place]] = {}
    for place in graph.in_scope("model"):
        if place.fqn in tensors or place.kind == "gradient":
            continue
        before = _tensor_before(place)
        tensors[place.fqn] = before
        names.setdefault(place.tensor_id, []).append(place.fqn)
        if before.storage is not None:
            same = storages.setdefault(before.storage, {})
            same.setdefault(place.tensor_id, place)
    return Snapshot(
        tensors=tensors,
        modules=tuple(
            _module_before(found) for found in graph.modules if found.scope == "model"
        ),
        ties=tuple(tuple(group) for group in names.values() if len(group) > 1),
        shares=tuple(
            shares_of(group.values()) for group in storages.values() if len(group) > 1
        ),
        groups=tuple(_groups(optimizer, graph) for optimizer in optimizers),
        held={
            place.fqn: graph.model_ids[place.tensor_id].fqn
            for place in graph.in_scope("holder")
            if place.tensor_id in graph.model_ids
        },
    )


def shares_of(places: Iterable[Place]) -> tuple[Share, ...]:
    """Say where in their storage the tensors of some places begin."""
    return tuple(
        Share(place, int(place.tensor.storage_offset()) * place.tensor.element_size())
        for place in places
    )


def tensor_hooks(tensor: Tensor) -> Hooks:
    """Return the hooks on a tensor, by the table that they stand in."""
    found = {}
    for table in TENSOR_HOOKS:
        hooks = getattr(tensor, table, None)
        if hooks:
            found[table] = tuple(hooks.values())
    return found


def _tensor_before(place: Place) -> TensorBefore:
    tensor = place.tensor
    own = getattr(type(tensor), "__carried_attributes__", None)
    carried = tensor.__dict__ if own is None else own(tensor)
    size, stride = geometry(tensor)
    deferred = is_deferred(tensor)
    return TensorBefore(
        place=place,
        tensor=tensor,
        deferred=deferred,
        size=size,
        stride=stride,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        is_leaf=is_leaf(tensor),
        attributes=dict(carried) if carried else {},
        hooks=tensor_hooks(tensor),
        version=None if deferred or tensor.is_inference() else tensor._version,
        storage=None if stride is None or not tensor.numel() else storage_key(tensor),
    )


def geometry(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...] | None]:
    """Return a tensor's size and strides; no strides where its layout has none.

    A nested tensor without layout `torch.jagged` has a first size alone.
    """
    if tensor.layout is not torch.strided:
        return tensor.size(), None
    if tensor.is_nested:
        return torch.Size([tensor.size(0)]), None
    return tensor.size(), tensor.stride()


def _module_before(found: ModulePlace) -> ModuleBefore:
    module = found.module
    attributes = vars(module)
    return ModuleBefore(
        fqn=found.fqn,
        module=module,
        module_class=type(module),
        training=module.training,
        transient=frozenset(module._non_persistent_buffers_set),
        attributes=tuple(attributes),
        hooks={
            table: tuple(hooks.values())
            for table in MODULE_HOOKS
            if (hooks := attributes.get(table))
        },
    )


def _groups(
    optimizer: Optimizer, graph: ObjectGraph
) -> tuple[tuple[str | None, ...], ...]:
    known = graph.model_ids
    return tuple(
        tuple(
            known[id(param)].fqn if id(param) in known else None
            for param in group["params"]
        )
        for group in optimizer.param_groups
    )

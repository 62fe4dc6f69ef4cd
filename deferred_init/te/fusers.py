"""Finds operation fusers, and brings up to date what they and others cache.

[Note: What a fuser caches]
`OperationFuser` keeps the Parameter objects of its ops in three lists, and a choice
of fused kernels that depends on the types of the parameters. As objects keep their
identity, the lists stay right by themselves; the counts and the choice do not where
weights became quantized or joined. A `Sequential` drops its fusers and builds new ones
in its first forward, which under FSDP2 has to see unsharded parameters; a fuser that
somebody else may hold is also put right in place.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.ops import Sequential as TESequential
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.ops.op import BasicOperation

from deferred_init.aliases import is_sharded
from deferred_init.handlers.protocol import Workspace
from deferred_init.object_contents import leave_out
from deferred_init.slots import Inventory, ModuleSite

__all__ = ["FuserRefresher", "find_fusers", "parameters_by_op", "stale_parameters"]

_ATOMS = (
    *(str, bytes, int, float, complex, bool, type(None), type, types.ModuleType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
    *(enum.Enum, types.BuiltinFunctionType, logging.Logger),
)
_BUILT_IN = frozenset({dict, list, tuple, set, frozenset})
_leaf_types: dict[type, bool] = {}
_MAX_TYPES = 1024  # it keeps types alive
_SKIPPED = frozenset(vars(nn.Module())) - {"_modules"}
_MAX_DEPTH = 16


class FuserRefresher:
    """Refreshes fusers, `_module_groups` and FP8 weight workspaces."""

    def refresh(
        self, inventory: Inventory, holders: Sequence[Any], workspace: Workspace
    ) -> None:
        """Do it once, after all steps."""
        modules = [site.module for site in inventory.sites()]
        kinds = {type(module) for module in modules}
        if not any(map(_is_of_te, kinds)):
            modules = []
        count = 0
        # A fuser without ops in the model caches none of its parameters.
        if any(issubclass(kind, BasicOperation) for kind in kinds):
            for fuser in find_fusers([*modules, *holders]):
                saved = dict(vars(fuser))
                workspace.on_undo(functools.partial(_restore, fuser, saved))
                refresh_fuser(fuser)
                count += 1
        for site in inventory.sites() if modules else ():
            _drop_caches(site, workspace)
        if count:
            workspace.note(f"refreshed {count} operation fuser(s)")


def _drop_caches(site: ModuleSite, workspace: Workspace) -> None:
    """Let a module make again what it derives from weights in its forward."""
    attributes = vars(site.module)
    if "_module_groups" in attributes and isinstance(site.module, TESequential):
        attributes["_module_groups"] = None
    prefix = f"{site.fqn}." if site.fqn else ""
    cached = attributes.get("_fp8_workspaces")
    if cached:
        attributes["_fp8_workspaces"] = {}
        for name in cached:
            workspace.drop(f"{prefix}_fp8_workspaces[{name!r}]")
    if attributes.pop("_is_fsdp2", None) is not None:
        workspace.drop(f"{prefix}_is_fsdp2")


def _is_of_te(kind: type) -> bool:
    return any(
        base.__module__.startswith("transformer_engine") for base in kind.__mro__
    )


def find_fusers(roots: Iterable[Any]) -> Iterator[OperationFuser]:
    """Yield every fuser reachable from modules and holders, each once.

    Looks into attributes, slots, lists, deques, dicts, sets, closures, defaults,
    partials and bound methods.
    """
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            value_id = id(value)
            if value_id in seen:
                continue
            seen.add(value_id)
            if isinstance(value, OperationFuser):
                yield value
            else:
                below += filter(_may_lead, _parts(value))
        level = below


def _may_lead(value: Any) -> bool:
    """Whether a value has parts; by its type, which is remembered."""
    own = type(value)
    if own in _BUILT_IN:
        return bool(value)
    known = _leaf_types.get(own)
    if known is None:
        if len(_leaf_types) >= _MAX_TYPES:
            _leaf_types.clear()
        known = _leaf_types[own] = issubclass(own, (Tensor, *_ATOMS))
    return not known


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return [part for name, part in vars(value).items() if name not in _SKIPPED]
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        return [*_cells(value), *defaults, *vars(value).values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if not type(value).__module__.startswith("torch."):
        return [*getattr(value, "__dict__", {}).values(), *_in_slots(value)]
    return ()


def _in_slots(value: Any) -> Iterator[Any]:
    """Yield what an object keeps in `__slots__`, without calling its properties."""
    kind: Any = type(value)
    for slot in _slots_of(kind):
        try:
            yield slot.__get__(value)
        except AttributeError:  # not set
            continue


@functools.lru_cache(maxsize=_MAX_TYPES)
def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return tuple(m for m in members if isinstance(m, types.MemberDescriptorType))


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def parameters_by_op(fuser: Any) -> list[list[nn.Parameter]]:
    """Return the parameters that a fuser's ops have now."""
    return [list(op.parameters()) for op in fuser._basic_ops]


def stale_parameters(fuser: Any) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Yield (op, position, cached, actual) where a fuser's list is out of date."""
    cached_lists = vars(fuser).get("_basic_op_params", [])
    for index, (cached, actual) in enumerate(
        zip(cached_lists, parameters_by_op(fuser), strict=False)
    ):
        for position, tensor in enumerate(cached):
            now = actual[position] if len(actual) == len(cached) else None
            if now is not tensor:
                yield index, position, tensor, now


def refresh_fuser(fuser: Any) -> None:
    """Rebuild a fuser's lists, and make it choose its kernels again."""
    attributes = vars(fuser)
    by_op = parameters_by_op(fuser)
    fresh = {
        "_basic_op_params": by_op,
        "_basic_op_num_params": [len(params) for params in by_op],
        "_flat_basic_op_params": [param for params in by_op for param in params],
        "_fused_ops_cache": {},
        "recipe_type": None,
        "backward_override": None,
        "first_op_requiring_backward": 0,
        "_last_amax_history_len": 0,
        # A fuser that counts registrations compares with this.
        "_param_version": -1,
    }
    attributes.update((k, v) for k, v in fresh.items() if k in attributes)


def _restore(fuser: Any, saved: dict[str, Any]) -> None:
    vars(fuser).clear()
    vars(fuser).update(saved)


def _has_shards(fuser: Any) -> bool:
    """Whether a fuser's ops hold shards, of which nothing that it caches is one."""
    parameters = (param for params in parameters_by_op(fuser) for param in params)
    return any(is_sharded(param) for param in parameters)


leave_out(OperationFuser, ("_basic_op_params", "_flat_basic_op_params"), _has_shards)

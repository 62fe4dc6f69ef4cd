"""Finds what FSDP2 keeps of its own about the parameters of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.aliases import is_sharded

__all__ = ["fsdp_groups", "fsdp_params", "name_of", "offload_devices", "split_ties"]
__all__ += ["unsharded_class", "unsharded_type"]


def fsdp_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield every parameter group of FSDP2 once."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    state = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None or state is None:
        return
    seen: set[int] = set()
    for module in modules:
        if not isinstance(module, fsdp.FSDPModule):
            continue
        found = state._get_module_fsdp_state(module)
        for group in _groups_of(found):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def fsdp_params(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's record of every parameter that it manages."""
    return [param for group in fsdp_groups(modules) for param in group.fsdp_params]


def offload_devices(modules: Iterable[nn.Module]) -> dict[int, torch.device]:
    """Map `id(parameter)` to the CPU for parameters that FSDP2 keeps there."""
    return {
        id(param.sharded_param): torch.device("cpu")
        for param in fsdp_params(modules)
        if param.offload_to_cpu
    }


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of a state; torch before 2.12 has one at most."""
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def split_ties(modules: Sequence[tuple[str, nn.Module]]) -> list[list[str]]:
    """Name parameters that were one tensor and that FSDP2 manages apart.

    Args:
        modules: All modules with their names.

    Returns:
        For each such tensor the names under which it is managed.
    """
    tensors = [
        (uid, param)
        for param in fsdp_params(module for _, module in modules)
        # Kept by torch 2.12 and later.
        if (uid := getattr(param, "_orig_param_uid", None)) is not None
    ]
    if len({uid for uid, _ in tensors}) == len(tensors):
        return []  # each is managed once
    named = {id(module): fqn for fqn, module in modules}
    held: dict[int, dict[int, str]] = {}
    for uid, param in tensors:
        names = held.setdefault(uid, {})
        names[id(param.sharded_param)] = name_of(param, named)
    return [list(names.values()) for names in held.values() if len(names) > 1]


def name_of(param: Any, modules: Mapping[int, str]) -> str:
    """Return the qualified name of a parameter that FSDP2 manages.

    Args:
        param: FSDP2's record of it.
        modules: The names of the modules, by `id`.
    """
    owner, name = param._module_info.module, param._module_info.param_name
    return f"{modules.get(id(owner), '?')}.{name}".lstrip(".")


def unsharded_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard` gave it one more."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    if fsdp is not None and kind.__mro__[1] is fsdp.FSDPModule:
        original: type[nn.Module] = kind.__mro__[2]
        return original
    return kind


def unsharded_class(tensor: Tensor) -> type[Tensor]:
    """Return the class that a tensor has on one device."""
    if not is_sharded(tensor):
        return type(tensor)
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor

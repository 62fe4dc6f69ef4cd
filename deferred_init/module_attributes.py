"""What modules hold besides what is registered, as far as it may lead to tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from deferred_init.object_contents import (
    ATOM_TYPES,
    BUILT_IN,
    itself,
    lead_nowhere,
    reader_of,
)

__all__ = ["held_by", "unregistered"]

Held = list[tuple[str, Any]]
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
# What FSDP2 keeps of its own; brought up to date by its refresher.
_WRAPPER_STATE = "__composable_api_state_key"
_BATCH = 64


def held_by(module: nn.Module) -> Held:
    """List the attributes of a module that may lead to tensors, with their names."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in _MODULE_INTERNALS  # most are, so that this comes first
        and type(value) not in ATOM_TYPES
        and (type(value) not in BUILT_IN or value)
        and not name.startswith(_WRAPPER_STATE)
    ]


def unregistered(roots: Iterable[nn.Module]) -> dict[int, Held]:
    """Return by `id` what each module below some roots holds unregistered.

    Where many modules together hold nothing that leads to a tensor, which is the rule,
    only the attributes that are tensors and modules themselves are listed.
    """
    modules = _tree(roots)
    found: dict[int, Held] = {}
    for start in range(0, len(modules), _BATCH):
        batch = [(id(each), held_by(each)) for each in modules[start : start + _BATCH]]
        found.update(batch)
        holding = [(key, held) for key, held in batch if held]
        nested = [
            value
            for _, held in holding
            for _, value in held
            if reader_of(type(value)) is not itself
        ]
        if nested and lead_nowhere(nested):
            found.update((key, [*filter(_is_itself, held)]) for key, held in holding)
    return found


def _is_itself(named: tuple[str, Any]) -> bool:
    return reader_of(type(named[1])) is itself


def _tree(roots: Iterable[nn.Module]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    rest = list(roots)
    while rest:
        module = rest.pop()
        module_id = id(module)
        if module_id not in found:
            found[module_id] = module
            rest += [child for child in module._modules.values() if child is not None]
    return list(found.values())

"""What modules hold besides what is registered, as far as it may lead to tensors.

[Note: Layouts]
A module has tens of attributes, of which few can hold anything: their types decide. So
of modules whose attributes have the same names and types in the same order, the same
attributes are worth a look, and which they are is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from deferred_init.object_contents import (
    BUILT_IN,
    itself,
    lead_nowhere,
    nothing,
    reader_of,
    when_readers_change,
)

__all__ = ["held_by", "unregistered"]

Held = list[tuple[str, Any]]
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
# What FSDP2 keeps of its own; brought up to date by its refresher.
_WRAPPER_STATE = "__composable_api_state_key"
_BATCH = 64
_MAX_LAYOUTS = 4096  # they keep types alive
# By names and types: the place and name of each, and whether not if it is empty.
_Layout = tuple[tuple[int, str, bool], ...]
_layouts: dict[tuple[tuple[str, ...], tuple[type, ...]], _Layout] = {}
when_readers_change(_layouts.clear)


def held_by(module: nn.Module) -> Held:
    """List the attributes of a module that may lead to tensors, with their names."""
    attributes = vars(module)
    key = tuple(attributes), tuple(map(type, attributes.values()))
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        layout = _layouts[key] = tuple(_worth_a_look(attributes))
    values = tuple(attributes.values())
    return [
        (name, values[place])
        for place, name, may_be_empty in layout
        if not may_be_empty or values[place]
    ]


def _worth_a_look(attributes: Mapping[str, Any]) -> Iterable[tuple[int, str, bool]]:
    for place, (name, value) in enumerate(attributes.items()):
        if (
            name not in _MODULE_INTERNALS
            and not name.startswith(_WRAPPER_STATE)
            and reader_of(type(value)) is not nothing
        ):
            yield place, name, type(value) in BUILT_IN


def unregistered(roots: Iterable[nn.Module]) -> dict[int, Held]:
    """Return by `id` what each module below some roots holds unregistered.

    Where many modules together hold nothing that leads to a tensor, which is the rule,
    only the attributes that are tensors and modules themselves are listed.
    """
    modules = _tree(roots)
    found: dict[int, Held] = {}
    for start in range(0, len(modules), _BATCH):
        batch = [(id(each), held_by(each)) for each in modules[start : start + _BATCH]]
        nested = [
            value
            for _, held in batch
            for _, value in held
            if reader_of(type(value)) is not itself
        ]
        if nested and lead_nowhere(nested):
            batch = [(key, [*filter(_is_itself, held)]) for key, held in batch]
        found.update(batch)
    return found


def _is_itself(named: tuple[str, Any]) -> bool:
    return reader_of(type(named[1])) is itself


def _tree(roots: Iterable[nn.Module]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    rest = list(roots)
    while rest:
        module = rest.pop()
        if id(module) not in found:
            found[id(module)] = module
            rest += [child for child in module._modules.values() if child is not None]
    return list(found.values())

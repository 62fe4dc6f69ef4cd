"""What kinds of object the audit's walk can look into, and what they hold."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BUILT_IN", "MODULE_HOOKS", "Kind", "atoms"]
__all__ += ["kind_of", "parts_of", "register_cache", "slot_parts", "when_kinds_change"]


class Kind(enum.Enum):
    """How an object is looked into."""

    __hash__ = object.__hash__  # that of an enum is written in Python

    ATOM = enum.auto()
    """Not at all."""
    TENSOR = enum.auto()
    MODULE = enum.auto()
    DICT = enum.auto()
    SEQUENCE = enum.auto()
    SET = enum.auto()
    FUNCTION = enum.auto()
    METHOD = enum.auto()
    PARTIAL = enum.auto()
    CELL = enum.auto()
    OBJECT = enum.auto()
    """By its instance dict and its slots."""
    CACHE = enum.auto()
    """Like an object, but for attributes that only cache what others hold."""


_ATOMS: tuple[type, ...] = (
    *(int, float, complex, str, bytes, bytearray, type(None), type, range, slice),
    *(enum.Enum, types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    *(types.GeneratorType, types.FrameType, types.TracebackType, BaseException),
    *(torch.dtype, torch.device, torch.Generator, torch.Size, torch.layout),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
    *(weakref.WeakSet, torch.storage.UntypedStorage, torch.storage.TypedStorage),
)
# Caches and graphs that hold fake tensors by right, and machinery of the process.
_OPAQUE = (
    *("torch._dynamo", "torch._inductor", "torch.fx", "torch._subclasses"),
    *("torch._functorch", "torch._guards", "torch.distributed", "deferred_init"),
    *("torch.export", "logging", "threading", "multiprocessing", "asyncio"),
    *("concurrent", "_thread", "inspect", "typing", "unittest"),
)
_SIMPLE = (
    (Tensor, Kind.TENSOR),
    (nn.Module, Kind.MODULE),
    (dict, Kind.DICT),
    (types.MappingProxyType, Kind.DICT),
    ((list, tuple, collections.deque), Kind.SEQUENCE),
    ((set, frozenset), Kind.SET),
    (types.FunctionType, Kind.FUNCTION),
    (types.MethodType, Kind.METHOD),
    (functools.partial, Kind.PARTIAL),
    (types.CellType, Kind.CELL),
)
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of a module that hold its hooks."""
BUILT_IN = frozenset({dict, list, tuple, set, frozenset})
"""Containers that hold nothing but their items."""
_known: dict[type, Kind] = {}
_atom_types: set[type] = set()
_cached: dict[type, frozenset[str]] = {}
_members: dict[type, tuple[tuple[str, types.MemberDescriptorType], ...]] = {}
_on_change: list[Callable[[], None]] = []


Parts = list[tuple[str, object]]
# Names for loops: to read a member of an enum takes as long as to call a function.
_OBJECT, _CACHE = Kind.OBJECT, Kind.CACHE


def register_cache(own: type, attributes: Iterable[str]) -> None:
    """Leave what a class caches to a detector of its own.

    Args:
        own: The class; the graph collects its instances, and those of its
            subclasses, as `caches`.
        attributes: Those that hold other objects' tensors.
    """
    _cached[own] = frozenset(attributes)
    _known.clear()  # subclasses may be known as something else
    for forget in _on_change:
        forget()


def when_kinds_change(forget: Callable[[], None]) -> None:
    """Call a function whenever what was remembered of types may be wrong."""
    _on_change.append(forget)


def kind_of(value: object) -> Kind:
    """Return how to look into an object; by its type alone, and remembered."""
    found = _known.get(type(value))
    return _classify(type(value)) if found is None else found


def atoms() -> Set[type]:
    """Return the types, among those seen so far, that nothing is looked for in.

    For loops over many values, which ask `kind_of` about the others only.
    """
    return _atom_types


def parts_of(value: Any, kind: Kind) -> Parts:
    """List what an object holds, each part with the label that leads to it.

    Atoms of types that were met before are left out. Lists and not generators, as
    most objects hold little or nothing, and there are tens of each module.
    """
    own = type(value)
    if own in BUILT_IN:
        return _PARTS[kind](value) if value else []
    if kind is _OBJECT:
        return _dict_parts(value) + slot_parts(value)
    if kind is _CACHE:
        skipped = next(_cached[base] for base in own.__mro__ if base in _cached)
        return [part for part in _dict_parts(value) if part[0][1:] not in skipped]
    found = _PARTS[kind](value)
    return found if kind in _WITHOUT_DICT else found + _dict_parts(value)


def _mapping_parts(value: Any) -> Parts:
    items = dict.items(value) if isinstance(value, dict) else value.items()
    found: Parts = [
        (f"[{key!r}]" if type(key) in (str, int) else "[...]", item)
        for key, item in items
        if type(item) not in _atom_types
    ]
    keys = dict.keys(value) if isinstance(value, dict) else value.keys()
    if not _atom_types.issuperset(map(type, keys)):
        found += [
            (f".keys()[{index}]", key)
            for index, key in enumerate(keys)
            if type(key) not in _atom_types
        ]
    return found


def _sequence_parts(value: Any) -> Parts:
    return [
        (f"[{index}]", item)
        for index, item in enumerate(_items_of(value))
        if type(item) not in _atom_types
    ]


def _set_parts(value: Any) -> Parts:
    items = set.copy(value) if isinstance(value, set) else tuple(value)
    return [("{...}", item) for item in items if type(item) not in _atom_types]


def _method_parts(value: Any) -> Parts:
    return [(".__self__", value.__self__), (".__func__", value.__func__)]


def _partial_parts(value: Any) -> Parts:
    names = ("func", "args", "keywords")
    return [(f".{name}", getattr(value, name)) for name in names]


def _function_parts(value: Any) -> Parts:
    found: Parts = []
    if value.__closure__:
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__, strict=True):
            found += [(f".<{name}>", part) for _, part in _cell_parts(cell)]
    if value.__defaults__:
        found.append((".__defaults__", value.__defaults__))
    if value.__kwdefaults__:
        found.append((".__kwdefaults__", value.__kwdefaults__))
    return found


def _cell_parts(cell: types.CellType) -> Parts:
    try:
        content = cell.cell_contents
    except ValueError:  # an empty cell
        return []
    return [] if type(content) in _atom_types else [("", content)]


def _classify(own: type) -> Kind:
    kind = Kind.OBJECT
    if any(base in _cached for base in own.__mro__):
        kind = Kind.CACHE
    elif issubclass(own, _ATOMS) and not _is_text_or_number_with_attributes(own):
        kind = Kind.ATOM
    else:
        for base, simple in _SIMPLE:
            if issubclass(own, base):
                kind = simple
                break
        else:
            package = own.__module__ if isinstance(own.__module__, str) else ""
            if any(package == p or package.startswith(f"{p}.") for p in _OPAQUE):
                kind = Kind.ATOM
    _known[own] = kind
    if kind is Kind.ATOM:
        _atom_types.add(own)
    return kind


def _is_text_or_number_with_attributes(own: type) -> bool:
    values = (str, bytes, int, float, complex)
    return (
        issubclass(own, values)
        and not issubclass(own, enum.Enum)
        and own.__dictoffset__ != 0
    )


def _items_of(value: Any) -> list[object]:
    """List the items of a sequence, past what its class overrides."""
    if isinstance(value, list):
        return list(list.__iter__(value))
    if isinstance(value, tuple):
        return list(tuple.__iter__(value))
    return list(collections.deque.__iter__(value))


def _instance_dict(value: object) -> dict[str, object]:
    """Return an object's own attributes, and nothing where it has no such dict."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if type(attributes) is dict else {}


def _dict_parts(value: object) -> Parts:
    return [
        (f".{name}", item)
        for name, item in _instance_dict(value).items()
        if type(item) not in _atom_types
    ]


def slot_parts(value: object) -> Parts:
    """List what an object holds in slots of its class."""
    own = type(value)
    members = _members.get(own)
    if members is None:
        members = _members[own] = tuple(_slot_members(own))
    found: Parts = []
    for label, member in members:
        try:
            found.append((label, member.__get__(value, own)))
        except AttributeError:  # not set
            continue
    return found


def _slot_members(own: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    for base in own.__mro__:
        if "__slots__" in base.__dict__:
            for name, member in base.__dict__.items():
                if isinstance(member, types.MemberDescriptorType):
                    yield f".{name}", member


_PARTS: dict[Kind, Callable[[Any], Parts]] = {
    Kind.DICT: _mapping_parts,
    Kind.SEQUENCE: _sequence_parts,
    Kind.SET: _set_parts,
    Kind.FUNCTION: _function_parts,
    Kind.METHOD: _method_parts,
    Kind.PARTIAL: _partial_parts,
    Kind.CELL: _cell_parts,
}
_WITHOUT_DICT = frozenset({Kind.METHOD, Kind.CELL})

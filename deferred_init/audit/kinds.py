"""What kinds of object the audit's walk can look into, and what they hold."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Kind", "kind_of", "parts_of", "register_cache"]


class Kind(enum.Enum):
    """How an object is looked into."""

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
    SLOTS = enum.auto()
    """By its slots alone; never the kind of an object."""
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
_known: dict[type, Kind] = {}
_cached: dict[type, frozenset[str]] = {}
_members: dict[type, tuple[tuple[str, types.MemberDescriptorType], ...]] = {}


def register_cache(own: type, attributes: Iterable[str]) -> None:
    """Leave what a class caches to a detector of its own.

    Args:
        own: The class; the graph collects its instances, and those of its
            subclasses, as `caches`.
        attributes: Those that hold other objects' tensors.
    """
    _cached[own] = frozenset(attributes)
    _known.clear()  # subclasses may be known as something else


def kind_of(value: object) -> Kind:
    """Return how to look into an object; by its type alone, and remembered."""
    found = _known.get(type(value))
    return _classify(type(value)) if found is None else found


def parts_of(value: Any, kind: Kind) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, each part with the label that leads to it."""
    if kind is Kind.DICT:
        items = dict.items(value) if isinstance(value, dict) else value.items()
        for key, item in list(items):
            yield f"[{key!r}]" if type(key) in (str, int) else "[...]", item
    elif kind is Kind.SEQUENCE:
        for index, item in enumerate(_sequence_iter(value)):
            yield f"[{index}]", item
    elif kind is Kind.SET:
        for item in set.copy(value) if isinstance(value, set) else tuple(value):
            yield "{...}", item
    elif kind is Kind.FUNCTION:
        for name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        ):
            yield f".<{name}>", cell
        yield ".__defaults__", value.__defaults__
        yield ".__kwdefaults__", value.__kwdefaults__
    elif kind is Kind.METHOD:
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif kind is Kind.PARTIAL:
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif kind is Kind.CELL:
        try:
            yield "", value.cell_contents
        except ValueError:  # an empty cell
            return
    elif kind is Kind.SLOTS:
        yield from _slot_parts(value)
    if kind is Kind.CACHE:
        skipped = next(_cached[b] for b in type(value).__mro__ if b in _cached)
        yield from (
            (label, part)
            for label, part in _dict_parts(value)
            if label[1:] not in skipped
        )
    elif kind not in (Kind.SLOTS, Kind.METHOD, Kind.CELL):
        yield from _dict_parts(value)
    if kind is Kind.OBJECT:
        yield from _slot_parts(value)


def _classify(own: type) -> Kind:
    kind = Kind.OBJECT
    if any(base in _cached for base in own.__mro__):
        kind = Kind.CACHE
    elif issubclass(own, _ATOMS):
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
    return kind


def _sequence_iter(value: Any) -> Iterator[object]:
    if isinstance(value, list):
        return iter(list(list.__iter__(value)))
    if isinstance(value, tuple):
        return iter(list(tuple.__iter__(value)))
    return iter(list(collections.deque.__iter__(value)))


def _dict_parts(value: object) -> Iterator[tuple[str, object]]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return
    if type(attributes) is dict:
        for name, item in list(attributes.items()):
            if kind_of(item) is not Kind.ATOM:
                yield f".{name}", item


def _slot_parts(value: object) -> Iterator[tuple[str, object]]:
    own = type(value)
    members = _members.get(own)
    if members is None:
        members = _members[own] = tuple(_slot_members(own))
    for label, member in members:
        try:
            yield label, member.__get__(value, own)
        except AttributeError:  # not set
            continue


def _slot_members(own: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    for base in own.__mro__:
        if "__slots__" in base.__dict__:
            for name, member in base.__dict__.items():
                if isinstance(member, types.MemberDescriptorType):
                    yield f".{name}", member

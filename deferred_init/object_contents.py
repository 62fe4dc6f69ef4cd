"""How the inventory looks into the objects that modules hold.

By their type alone, which is remembered: a model has tens of such objects a module.
"""

from __future__ import annotations

import collections
import enum
import gc
import logging
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deferred_init.slotted_objects import SlottedAttributes, slot_members

__all__ = ["ATOM_TYPES", "BUILT_IN", "itself", "lead_nowhere", "leave_out"]
__all__ += ["look_into", "nothing", "reader_of"]

_ATOMS = (
    *(int, float, complex, str, bytes, bool, type(None), type, torch.dtype),
    *(logging.Logger, logging.Handler),  # which lead to each other
)
ATOM_TYPES = frozenset(
    {int, float, complex, str, bytes, bool, type(None), type, torch.dtype}
    | {torch.device, torch.Size, type(lambda: 0), type(len), range, slice}
    | {types.MethodType, types.ModuleType}
)
"""Types of values that hold no tensors."""
BUILT_IN = frozenset({dict, list, tuple, set, frozenset})
"""Types of containers that hold nothing but their items."""
# What they refer to weakly is held by others.
_WEAK = (weakref.WeakKeyDictionary, WeakIdKeyDictionary)
Items = tuple[Any, list[tuple[Any, str, Any]]]
Reader = Callable[[Any], Items]
_READERS: dict[type, Reader] = {}
_HAS_GC = 1 << 14  # `Py_TPFLAGS_HAVE_GC`: the collector of garbage knows its contents
_followed: set[type] = set()
_MAX_TYPES = 1024  # it keeps types alive
# Classes whose instances can be called and hold tensors all the same.
_CALLABLE_HOLDERS: set[tuple[str, str]] = set()
# By class: attributes that are no places of tensors, and of which instances that holds.
_CACHES: dict[type, tuple[frozenset[str], Callable[[Any], bool]]] = {}


def leave_out(
    own: type, attributes: Iterable[str], when: Callable[[Any], bool]
) -> None:
    """Do not take for places of tensors what instances of a class cache.

    Args:
        own: The class; its subclasses are meant as well.
        attributes: Those in which tensors of others are cached.
        when: Says of an instance whether they are to be left out.
    """
    _CACHES[own] = (frozenset(attributes), when)
    _forget()


def look_into(module_name: str, class_name: str) -> None:
    """Look for tensors in instances of a class and its subclasses, though callable."""
    _CALLABLE_HOLDERS.add((module_name, class_name))
    _forget()


def _forget() -> None:
    _READERS.clear()
    _followed.clear()


def _is_looked_into(own: type) -> bool:
    return any((c.__module__, c.__name__) in _CALLABLE_HOLDERS for c in own.__mro__)


def reader_of(own: type) -> Reader:
    """Return how to look into objects of a type; remembered."""
    found = _READERS.get(own)
    return _find_reader(own) if found is None else found


def lead_nowhere(values: Collection[object]) -> bool:
    """Whether no tensor and no module can be reached from some values.

    Asks the collector of garbage what they refer to, level by level and all at once,
    which takes a fraction of the time of a walk that knows each step's name.

    Returns:
        False also where it cannot be said: of containers with methods of their own.
    """
    passed: dict[int, object] = {}
    level = values
    while level:
        new: dict[int, object] = {}
        for value in level:
            own = type(value)
            if own in ATOM_TYPES:
                continue
            if own not in _followed:
                reader = reader_of(own)
                if reader is nothing:
                    continue
                if reader is itself or not _can_be_followed(own, reader):
                    return False
                _followed.add(own)
            value_id = id(value)
            if value_id not in passed:
                new[value_id] = value
        passed |= new
        level = gc.get_referents(*new.values())
    return True


def _can_be_followed(own: type, reader: Reader) -> bool:
    """Whether a reader finds no more than what the collector knows of."""
    if not own.__flags__ & _HAS_GC:
        return False
    if reader in (_of_object, _of_slotted) or own is collections.OrderedDict:
        return True
    kept = ((dict, "items"), (list, "__iter__"), (tuple, "__iter__"))
    return any(
        issubclass(own, base) and getattr(own, name) is getattr(base, name)
        for base, name in (*kept, (set, "__iter__"), (frozenset, "__iter__"))
    )


def _find_reader(own: type) -> Reader:
    if len(_READERS) >= _MAX_TYPES:
        _READERS.clear()
    found: Reader = _of_object
    if issubclass(own, (Tensor, nn.Module)):
        found = itself
    elif issubclass(own, Mapping):
        found = _of_mapping
    elif issubclass(own, (list, tuple)):
        found = _of_sequence
    elif issubclass(own, (set, frozenset)):
        found = _of_set
    elif issubclass(own, _ATOMS) and not _has_attributes(own):
        found = nothing
    elif any("__call__" in vars(base) for base in own.__mro__):
        found = _of_object if _is_looked_into(own) else nothing
    if found is _of_object and any(base in _CACHES for base in own.__mro__):
        found = _of_caching_object
    if found is _of_object and slot_members(own):
        found = _of_slotted
    _READERS[own] = found
    return found


def _has_attributes(own: type) -> bool:
    """Whether texts or numbers of a class of their own may carry something."""
    values = (str, bytes, int, float, complex)
    is_value = issubclass(own, values) and not issubclass(own, enum.Enum)
    return is_value and own.__dictoffset__ != 0


# Each returns a container and (key, label, item) of what may lead to tensors in it.
def nothing(value: Any) -> Items:
    """Read an object that holds nothing."""
    return value, []


def itself(value: Any) -> Items:
    """Read a tensor or a module, which are no containers."""
    return value, []


def _of_mapping(value: Any) -> Items:
    keyed = list(value.items())
    items = [(k, f"[{k!r}]", v) for k, v in keyed if _may_hold(v)]
    if not ATOM_TYPES.issuperset(map(type, value)) and not isinstance(value, _WEAK):
        # Nothing can be put into the place of a key, as into that of a tuple's item.
        items.append((None, ".keys()", tuple(key for key, _ in keyed)))
    return value, items


def _of_sequence(value: Any) -> Items:
    return value, [(i, f"[{i}]", v) for i, v in enumerate(value) if _may_hold(v)]


def _of_set(value: Any) -> Items:
    frozen = tuple(value)
    return frozen, [(i, "{...}", v) for i, v in enumerate(frozen) if _may_hold(v)]


def _of_object(value: Any) -> Items:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return value, []
    named = list(attributes.items())
    return attributes, [(k, f".{k}", v) for k, v in named if _may_hold(v)]


def _of_slotted(value: Any) -> Items:
    attributes = SlottedAttributes(value)
    named = [(name, attributes.get(name)) for name in attributes]
    return attributes, [(k, f".{k}", v) for k, v in named if _may_hold(v)]


def _of_caching_object(value: Any) -> Items:
    attributes, items = _of_object(value)
    cached = _left_out(value)
    return attributes, [item for item in items if item[0] not in cached]


def _may_hold(value: Any) -> bool:
    """Whether it is worth looking at an item of a container."""
    own = type(value)
    return own not in ATOM_TYPES and (own not in BUILT_IN or bool(value))


def _left_out(value: Any) -> frozenset[str]:
    for base in type(value).__mro__:
        if base in _CACHES:
            names, when = _CACHES[base]
            return names if when(value) else frozenset()
    return frozenset()

"""Identity: give an existing tensor object new contents, and keep what it carried.

[Note: What a swap moves]
`torch.utils.swap_tensors` exchanges class, `__dict__` and the C++ tensor behind two
Python objects. What must stay with the old object is put back here: its Python
attributes, and its hooks. Hooks live twice, in a Python dict that stays with the
object and in the C++ tensor that leaves it; assigning the dict to itself registers
it with the new C++ tensor (the setters of `_backward_hooks` and of
`_post_accumulate_grad_hooks` do so), and handles that the user holds go on working.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import BARE_TYPES, is_recorded
from deferred_init.record.paused import no_dispatch

__all__ = ["exchange", "outside_use", "swap_obstacle", "take_over"]

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_UNSET: Any = object()


def swap_obstacle(tensor: Tensor, *, known_views: int = 0) -> str | None:
    """Say what keeps a tensor from being swapped, or None.

    Args:
        tensor: The tensor object that would get new contents.
        known_views: How many views of it will be swapped together with it.
    """
    if weakref.getweakrefs(tensor):
        return "a weak reference to it exists"
    return outside_use(tensor, known_views=known_views)


def outside_use(tensor: Tensor, *, known_views: int = 0) -> str | None:
    """Say what holds the C++ tensor behind a tensor object besides that, or None.

    After an exchange it goes on holding the old one, which has no memory.

    Args:
        tensor: The tensor object that would get new contents.
        known_views: How many views of it will be exchanged together with it.
    """
    extra = _use_count(tensor) - 1 - known_views
    if extra > 0 and tensor.is_leaf and tensor.requires_grad:
        # One extra use may be its own AccumulateGrad node, which does no harm.
        before = _use_count(tensor)
        with _unrecorded(tensor):
            node = torch.autograd.graph.get_gradient_edge(tensor).node
        extra -= int(_use_count(tensor) == before)
        del node
    return "a view of it, or a graph that uses it, is alive" if extra > 0 else None


def _unrecorded(tensor: Tensor) -> AbstractContextManager[object]:
    """Keep a look at a tensor out of its recording, which would grow by it."""
    return no_dispatch() if is_recorded(tensor) else nullcontext()


def exchange(
    old: Tensor, new: Tensor, log: Callable[[Callable[[], None]], None] | None = None
) -> Callable[[], None]:
    """Give `old` the contents of `new`; `old` keeps its identity and what it carried.

    Weak references, views and live graphs, for which `swap_tensors` refuses, do not
    stop it: weak references stay right because the object stays, and whatever else
    holds the old C++ tensor (a view kept in a local variable, an old graph) goes on
    holding it and stays without memory. `swap_obstacle` tells of these beforehand.

    Args:
        old: The object that everybody holds.
        new: A freshly made tensor. Its own attributes win over carried ones of
            the same name (a quantized tensor keeps its data in attributes).
        log: Is handed the undo function before anything is changed, because an
            interrupt may come between any two lines.

    Returns:
        A function that undoes the exchange, all of it or what was done of it; it
        may be called again.

    Raises:
        TypeError: If Python cannot exchange the two classes; nothing was changed.
    """
    if type(old) is type(new) and _is_simple(old) and _is_simple(new):
        return _exchange_alike(old, new, log)
    saved: dict[str, Any] = dict(old.__dict__)
    made: dict[str, Any] = dict(new.__dict__)
    carried = _carried(old)
    undo = _undo_of(old, new, saved, made)
    if log is not None:
        log(undo)
    if _use_count(old) > 1 and swap_obstacle(old) is None and _same_slots(old, new):
        torch.utils.swap_tensors(old, new)  # which also guards an old graph node
    else:
        _swap_unchecked(old, new)
    old.__dict__ = {**carried, **made}
    _reregister_hooks(old)
    return undo


def take_over(
    old: Tensor, new: Tensor, log: Callable[[Callable[[], None]], None]
) -> bool:
    """Give `old` the attributes of `new`, if the two are the same memory already.

    For init code that wraps the tensor which it was given in a new Parameter.

    Returns:
        False if they are not alike; then nothing was done.
    """
    alike = (
        type(old) is type(new)
        and type(old) in BARE_TYPES
        and old.requires_grad == new.requires_grad
        and old.is_leaf
        and new.is_leaf
        and not any(getattr(new, name, None) for name in _HOOKS)
        and _is_same_memory(old, new)
    )
    if alike and new.__dict__:
        log(partial(setattr, old, "__dict__", old.__dict__))
        old.__dict__ = {**old.__dict__, **new.__dict__}
    return alike


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    with no_dispatch():  # a mode has nothing to say to a question about bare tensors
        return one.is_set_to(other)


def _is_simple(tensor: Tensor) -> bool:
    """Whether a tensor has neither hooks, nor other users, nor attributes set apart.

    Most have not, and their contents can be exchanged in a fraction of the time.
    """
    return (
        tensor._use_count() == 1  # type: ignore[attr-defined]
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
        and not _keeps_apart(type(tensor))
    )


def _exchange_alike(
    old: Tensor, new: Tensor, log: Callable[[Callable[[], None]], None] | None
) -> Callable[[], None]:
    """Exchange two simple tensors of one class."""
    saved, made = old.__dict__, new.__dict__
    slots = [
        (name, getattr(old, name, _UNSET), getattr(new, name, _UNSET))
        for name in _slot_names(type(old))
    ]
    undo = partial(_undo_alike, old, new, old._cdata, saved.copy(), made.copy(), slots)
    if log is not None:
        log(undo)
    for name, of_old, of_new in slots:
        _set_slot(new, name, of_old)
        _set_slot(old, name, of_new)
    torch._C._swap_tensor_impl(old, new)
    if saved or made:
        old.__dict__, new.__dict__ = {**saved, **made}, saved
    return undo


def _undo_alike(
    old: Tensor,
    new: Tensor,
    behind: int,
    saved: dict[str, Any],
    made: dict[str, Any],
    slots: list[tuple[str, Any, Any]],
) -> None:
    """Take back an exchange, and attributes that were set since."""
    old.__dict__, new.__dict__ = saved, made
    for name, of_old, of_new in slots:
        _set_slot(old, name, of_old)
        _set_slot(new, name, of_new)
    if old._cdata != behind:
        torch._C._swap_tensor_impl(old, new)
    _reregister_hooks(old)


def _set_slot(tensor: Tensor, name: str, value: Any) -> None:
    if value is not _UNSET:
        setattr(tensor, name, value)


@lru_cache(maxsize=256)
def _keeps_apart(tensor_type: type) -> bool:
    """Whether a class says itself which attributes of its tensors a user has set."""
    return hasattr(tensor_type, "__carried_attributes__")


@lru_cache(maxsize=256)
def _slot_names(tensor_type: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a class and its bases."""
    return tuple(copyreg._slotnames(tensor_type))  # type: ignore[attr-defined]


def _undo_of(
    old: Tensor, new: Tensor, saved: dict[str, Any], made: dict[str, Any]
) -> Callable[[], None]:
    """Return a function that puts both tensors back from wherever they are."""
    pairs = ((old, type(old), saved), (new, type(new), made))
    slots = [
        (tensor, name, getattr(tensor, name))
        for tensor in (old, new)
        for name in _slot_names(type(tensor))
        if hasattr(tensor, name)
    ]
    behind = old._cdata

    def undo() -> None:
        for tensor, kind, attributes in pairs:
            if type(tensor) is not kind:
                tensor.__class__ = kind
            tensor.__dict__ = attributes
        for tensor, name, value in slots:
            setattr(tensor, name, value)
        if old._cdata != behind:
            torch._C._swap_tensor_impl(old, new)
        _reregister_hooks(old)

    return undo


def _carried(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that stay; a class may keep its own internals out."""
    own = getattr(type(tensor), "__carried_attributes__", None)
    return dict(tensor.__dict__) if own is None else dict(own(tensor))


def _same_slots(old: Tensor, new: Tensor) -> bool:
    return set(_slot_names(type(old))) == set(_slot_names(type(new)))


def _use_count(tensor: Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _swap_unchecked(t1: Tensor, t2: Tensor) -> None:
    if type(t1) is not type(t2):
        t1.__class__, t2.__class__ = type(t2), type(t1)
    t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    for name in _slot_names(type(t1)):
        first, second = getattr(t1, name, None), getattr(t2, name, None)
        setattr(t1, name, second)
        setattr(t2, name, first)
    torch._C._swap_tensor_impl(t1, t2)


def _reregister_hooks(tensor: Tensor) -> None:
    for name in _HOOKS:
        hooks = getattr(tensor, name, None)
        if hooks:
            setattr(tensor, name, hooks)

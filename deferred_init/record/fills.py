"""Whole-tensor fills: the commonest operation of all, recorded without dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.append import Draw, append_fill
from deferred_init.record.nodes import Value

__all__ = ["fill_method", "record_fill"]

_base = torch._C.TensorBase


def record_fill(
    tensor: Tensor, call: Callable[..., Any], args: tuple[Any, ...], draw: Draw | None
) -> Tensor:
    """Record an in-place fill of the whole tensor as one node; dispatch nothing."""
    value: Value = tensor.__dict__["_value"]
    recording = value.recording
    with recording.lock:
        append_fill(recording, value, call, args, draw)
    return tensor


def fill_method(name: str, draws: bool) -> Callable[..., Any]:
    """Build the method that records one of torch's whole-tensor fills."""
    base = getattr(_base, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = kwargs.pop("generator", None)
        plain = not any(isinstance(arg, Tensor) for arg in args)
        allowed = not (torch.is_grad_enabled() and self.requires_grad)
        if plain and allowed and not kwargs.keys() - _SCALARS and not self.is_complex():
            if kwargs:
                args = _positional(name, args, kwargs)
            return record_fill(self, base, args, Draw(generator) if draws else None)
        if generator is not None:
            kwargs["generator"] = generator
        return base(self, *args, **kwargs)

    method.__name__ = name
    return method


_ORDER: dict[str, tuple[tuple[str, float], ...]] = {
    "uniform_": (("from", 0.0), ("to", 1.0)),
    "normal_": (("mean", 0.0), ("std", 1.0)),
    "fill_": (("value", 0.0),),
    "zero_": (),
}
_SCALARS = frozenset({"from", "to", "mean", "std", "value"})


def _positional(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Put the keyword arguments of a fill in their places."""
    rest = _ORDER[name][len(args) :]
    return (*args, *(kwargs.get(key, default) for key, default in rest))

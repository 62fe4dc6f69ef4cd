"""What `on_meta` remembers of constructions that the module itself forgets."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["remember_rotary_dim", "rotary_dim"]

_rotary_dims: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def remember_rotary_dim(module: nn.Module, dim: int, rotary_percent: float) -> None:
    """Keep the number of dimensions that a rotary embedding turns."""
    _rotary_dims[module] = int(dim * rotary_percent) if rotary_percent < 1.0 else dim


def rotary_dim(module: nn.Module) -> int | None:
    """Return it, or None if the module was built outside of `on_meta`."""
    return _rotary_dims.get(module)

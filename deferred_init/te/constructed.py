"""What is known of a module's making that the module itself forgets."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["is_rowwise_only", "mark_rowwise_only"]
__all__ += ["remember_rotary_dim", "rotary_dim"]

_rotary_dims: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_rowwise_only: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def remember_rotary_dim(module: nn.Module, dim: int, rotary_percent: float) -> None:
    """Keep the number of dimensions that a rotary embedding turns."""
    _rotary_dims[module] = int(dim * rotary_percent) if rotary_percent < 1.0 else dim


def rotary_dim(module: nn.Module) -> int | None:
    """Return it, or None if the module was built outside of `on_meta`."""
    return _rotary_dims.get(module)


def mark_rowwise_only(module: nn.Module) -> None:
    """Note that a module's quantized weights are for inference, on purpose."""
    _rowwise_only[module] = True


def is_rowwise_only(module: nn.Module) -> bool:
    """Whether a module's quantized weights have no column-wise data on purpose."""
    return module in _rowwise_only

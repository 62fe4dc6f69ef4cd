"""Tells whether tensors of a module are computed from others: parametrized, or hooked.

Parametrized modules are those of `torch.nn.utils.parametrize`; hooked ones those of
the older `torch.nn.utils.weight_norm` and `spectral_norm`, which compute the weight
before each forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["is_parametrized", "is_reparametrized", "norm_hooks", "original_type"]
__all__ += ["parametrizations_of"]

_TABLE = "parametrizations"


def parametrizations_of(module: nn.Module) -> nn.ModuleDict | None:
    """Return a module's parametrizations, also if it defines `__getattr__`."""
    held = vars(module)
    table, children = held.get(_TABLE), held.get("_modules")
    if not table and isinstance(children, dict):  # those of a script are none
        table = children.get(_TABLE)
    if not table:
        return None
    return table if isinstance(table, nn.ModuleDict) else None


def is_parametrized(module: nn.Module) -> bool:
    """What torch's function says, for modules with any `__getattr__` too."""
    return parametrizations_of(module) is not None


def original_type(module: nn.Module) -> type:
    """Return the class of a module as it was before it was parametrized."""
    if is_parametrized(module):
        found: type = type_before_parametrizations(module)
        return found
    return type(module)


def is_reparametrized(module: nn.Module) -> bool:
    """Whether any tensor of a module itself is computed from other tensors."""
    return is_parametrized(module) or bool(norm_hooks(module))


def norm_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of the older weight and spectral norm, in their order."""
    hooks = module._forward_pre_hooks
    if not hooks:
        return []
    return [h for h in hooks.values() if isinstance(h, (WeightNorm, SpectralNorm))]

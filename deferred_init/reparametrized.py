"""Tells whether tensors of a module are computed from others: parametrized, or hooked.

Parametrized modules are those of `torch.nn.utils.parametrize`; hooked ones those of
the older `torch.nn.utils.weight_norm` and `spectral_norm`, which compute the weight
before each forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["is_reparametrized", "norm_hooks"]


def is_reparametrized(module: nn.Module) -> bool:
    """Whether any tensor of a module itself is computed from other tensors."""
    return is_parametrized(module) or bool(norm_hooks(module))


def norm_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of the older weight and spectral norm, in their order."""
    hooks = module._forward_pre_hooks
    if not hooks:
        return []
    return [h for h in hooks.values() if isinstance(h, (WeightNorm, SpectralNorm))]

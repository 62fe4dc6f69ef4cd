"""Recognizes modules that compute a plain RMS norm, whatever their class is called.

Hugging Face has some sixty classes named `...RMSNorm`. Most are the plain one; Gemma's
multiplies by `1 + weight`, others have gates. The name does not tell, so a small one
of the same class is asked what it computes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["rms_norm_obstacle", "rms_norm_of"]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_SIZE = 16


def rms_norm_of(module: nn.Module) -> float | None:
    """Return the epsilon of a module that claims to be an RMS norm, or None."""
    weight = module._parameters.get("weight")
    named = "RMSNorm" in type(module).__name__
    if not named or weight is None or module._modules or weight.ndim != 1:
        return None
    if not type(module).__module__.startswith(("torch.", "transformers.")):
        return None
    found: Any = next(
        (vars(module)[name] for name in _EPS_NAMES if name in vars(module)), None
    )
    if found is None and isinstance(module, nn.RMSNorm):
        found = torch.finfo(weight.dtype).eps
    return None if found is None else float(found)


def rms_norm_obstacle(module: nn.Module) -> str:
    """Say why a module is no plain RMS norm; empty if it is."""
    kind: Any = type(module)
    if _is_plain(kind):
        return ""
    return f"{type(module).__name__} computes something else than a plain RMS norm"


@cache
def _is_plain(cls: Any) -> bool:
    """Compare a small module of a class with torch's RMS norm."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        try:
            module = cls(_SIZE, eps=0.25)
            weight = torch.linspace(-1.0, 2.0, _SIZE)
            module.weight.copy_(weight)
            x = torch.randn(3, _SIZE, generator=torch.Generator().manual_seed(0))
            made = module(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        expected = torch.nn.functional.rms_norm(x, (_SIZE,), weight, 0.25)
        return isinstance(made, torch.Tensor) and torch.allclose(
            made, expected, rtol=1e-4, atol=1e-5
        )

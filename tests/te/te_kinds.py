"""One small model of every class of Transformer Engine that has parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from te_capabilities import te_needs
from torch import nn

__all__ = ["MODULES", "kinds"]

MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "Linear": lambda te: te.Linear(8, 8),
    "LayerNormLinear": lambda te: te.LayerNormLinear(8, 8),
    "LayerNormMLP": lambda te: te.LayerNormMLP(8, 16),
    "GroupedLinear": lambda te: te.GroupedLinear(2, 8, 8),
    "LayerNorm": lambda te: te.LayerNorm(8),
    "RMSNorm": lambda te: te.RMSNorm(8),
    "DotProductAttention": lambda te: te.DotProductAttention(
        2, 8, softmax_type="learnable"
    ),
    "TransformerLayer": lambda te: te.TransformerLayer(
        16, 32, 2, softmax_type="learnable", qk_norm_type="RMSNorm"
    ),
    "MultiheadAttention": lambda te: te.MultiheadAttention(16, 2),
    "ops.BasicLinear": lambda te: te.ops.BasicLinear(8, 8),
    "ops.Bias": lambda te: te.ops.Bias(8),
    "ops.LayerNorm": lambda te: te.ops.LayerNorm(8),
    "ops.RMSNorm": lambda te: te.ops.RMSNorm(8),
    "ops.Linear": lambda te: te.ops.Linear(8, 8),
    "ops.GroupedLinear": lambda te: te.ops.GroupedLinear(2, 8, 8),
}


def kinds() -> list[Any]:
    """Return the names as cases of a test; releases may lack the last."""
    needs = te_needs("ops.GroupedLinear")
    return [
        pytest.param(kind, marks=needs if kind == "ops.GroupedLinear" else ())
        for kind in MODULES
    ]

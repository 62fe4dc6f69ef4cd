"""What operators do that their schemas do not say.

Operators are named as in their schemas, without overloads: `aten::normal_`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FILLS", "LEAVES_RAW", "OVERWRITES", "is_silent_write"]


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


FILLS = _aten(
    *("cauchy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_", "zero_"),
)
"""Fill all of their first argument with numbers or random numbers."""

OVERWRITES = FILLS | _aten("bernoulli_", "copy_")
"""Overwrite all of their first argument without reading it."""

LEAVES_RAW = _aten(
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
)
"""Return memory that nobody has written."""

_BATCH_NORMS = _aten(
    *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    *("batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm"),
    "native_batch_norm",
)
_STATISTICS = ("running_mean", "running_var")


def is_silent_write(func: Any, argument: str) -> bool:
    """Whether an operator overload may write to an argument that it calls read-only.

    Batch normalization updates its running statistics in place, but most of its
    operators are declared as if they only read them. Who follows writes by schemas
    alone loses what a forward in a constructor did to them.
    """
    return argument in _STATISTICS and func._schema.name in _BATCH_NORMS

"""Operators that write to arguments without saying so in their schemas.

Batch normalization updates its running statistics in place, but most of its operators
are declared as if they only read them. Who follows writes by schemas alone loses what
a forward in a constructor did to them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_silent_write"]

_OPERATORS = frozenset(
    "aten::" + name
    for name in (
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    )
)
_STATISTICS = ("running_mean", "running_var")


def is_silent_write(func: Any, argument: str) -> bool:
    """Whether an operator overload may write to an argument that it calls read-only."""
    return argument in _STATISTICS and func._schema.name in _OPERATORS

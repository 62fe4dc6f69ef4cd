"""Strides for which the meta device tells a GPU's, although the values are a CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.record.call import Call

__all__ = ["on_cpu"]

_SVD = torch.ops.aten._linalg_svd.default


def on_cpu(func: Any, call: Call, out: Any) -> Any:
    """Return what an operation made on meta, with the strides of the call's device.

    LAPACK returns the right singular vectors column after column, cuSOLVER row after
    row; meta counts as no CPU.
    """
    if func is not _SVD or call.inherits is None:
        return out
    device = call.inherits.device or call.recording.device
    if device.type != "cpu":
        return out
    u, s, vh = out
    return u, s, _column_major(vh)


def _column_major(meta: Tensor) -> Tensor:
    """Return an empty tensor of the same size whose matrices lie column by column."""
    return torch.empty_like(meta.mT, memory_format=torch.contiguous_format).mT

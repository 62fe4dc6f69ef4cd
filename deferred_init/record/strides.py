"""Strides for which the meta device tells a GPU's, although the values are a CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.record.call import Call

__all__ = ["on_cpu"]

_aten = torch.ops.aten
_SVD, _EIG = _aten._linalg_svd.default, _aten.linalg_eig.default
_REAL_FFT = "aten::_fft_r2c"


def on_cpu(func: Any, call: Call, out: Any) -> Any:
    """Return what an operation made on meta, with the strides of the call's device.

    LAPACK returns the right singular vectors and the eigenvectors column after column,
    cuSOLVER row after row; a transform of real numbers over several dims lies on a CPU
    row after row. Meta counts as no CPU.
    """
    is_fft = func.name() == _REAL_FFT
    if not (is_fft or func in (_SVD, _EIG)) or call.inherits is None:
        return out
    device = call.inherits.device or call.recording.device
    if device.type != "cpu":
        return out
    if is_fft:
        return torch.empty_like(out, memory_format=torch.contiguous_format)
    *rest, vectors = out
    return (*rest, _column_major(vectors))


def _column_major(meta: Tensor) -> Tensor:
    """Return an empty tensor of the same size whose matrices lie column by column."""
    return torch.empty_like(meta.mT, memory_format=torch.contiguous_format).mT

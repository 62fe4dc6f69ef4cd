"""Fill a tensor from a stream, by Triton on a CUDA device, else by torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import dense_bytes
from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.philox import Key
from deferred_init.fast.torch_fill import fill_with_torch
from deferred_init.fast.window import Window

__all__ = ["fill", "fillable", "writer"]

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

Fill = Callable[[Tensor, Window, Distribution, Key], None]


def writer(
    distribution: Distribution, key: Key
) -> Callable[[Tensor, Window | None], None]:
    """Return a function that fills a tensor, or a window of one."""

    def write(out: Tensor, window: Window | None) -> None:
        fill(out, distribution, key, window)

    return write


def fillable(tensor: Tensor, distribution: Distribution) -> bool:
    """Whether `fill` can write all of a tensor's memory; a meta tensor will do.

    False for parts of a tensor, other dtypes and layouts, and for parameters that
    torch refuses.
    """
    return (
        tensor.dtype in _DTYPES
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == dense_bytes(tensor)
        and _supported(distribution, tensor.dtype)
    )


def _supported(distribution: Distribution, dtype: torch.dtype) -> bool:
    if isinstance(distribution, TruncatedNormal):
        numbers = [distribution.mean, distribution.std]
        return all(map(math.isfinite, numbers)) and distribution.supported
    if isinstance(distribution, Normal):
        numbers = [distribution.mean, distribution.std]
        return all(map(math.isfinite, numbers)) and distribution.std >= 0
    limit = torch.finfo(dtype).max
    low, high = distribution.low, distribution.high
    return -limit <= low <= high <= limit and high - low <= limit


def fill(
    out: Tensor, distribution: Distribution, key: Key, window: Window | None = None
) -> None:
    """Fill a tensor with values that depend on the stream and their place alone.

    Args:
        out: Contiguous; bfloat16, float16 or float32; changed in place.
        distribution: What is drawn.
        key: The stream, see `philox.stream_key`.
        window: Which elements of a larger tensor these are; None if it is whole.
    """
    window = window or Window.of_whole(out.numel())
    assert window.numel == out.numel(), "a window is as large as its memory"
    with torch.no_grad():
        _fill_on(out.device)(out.detach(), window, distribution, key)


def _fill_on(device: torch.device) -> Fill:
    if device.type != "cuda":
        return fill_with_torch
    return _on_cuda(device.index or 0)


@lru_cache(maxsize=64)
def _on_cuda(index: int) -> Fill:  # pragma: no cover - needs CUDA
    """Choose once for a device; what Triton lacks is found out by a small fill."""
    try:
        from deferred_init.fast.triton_fill import fill_with_triton

        probe = torch.empty(8, dtype=torch.bfloat16, device=f"cuda:{index}")
        fill_with_triton(probe, Window.of_whole(8), Uniform(), (0, 0, 0, 0))
    except _UNUSABLE as error:
        warnings.warn(
            f'rng="fast" goes without Triton, at a fraction of its speed: '
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return fill_with_torch
    found: Any = fill_with_triton
    return found  # type: ignore[no-any-return]


_UNUSABLE = (ImportError, OSError, RuntimeError, ValueError, AttributeError)

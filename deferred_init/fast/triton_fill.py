"""Launches the Triton kernel; importing this needs Triton."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from deferred_init.fast.distributions import Distribution, Normal, Uniform
from deferred_init.fast.kernels import fill_kernel
from deferred_init.fast.philox import ROUNDS, Key
from deferred_init.fast.window import Window

__all__ = ["Tuning", "fill_with_triton"]

# The interpreter, which runs kernels on a CPU for tests, has no approximations.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_ALIGNMENT = 16
# [Note: Kernels launched without a look at their arguments]
# Triton looks at all arguments of a launch, to find the kernel that is compiled for
# their kinds, which takes the host longer than the GPU takes for 100 MB. So what it
# found is kept under all that it looks at, and launched directly. Of numbers with a
# fraction, and of those that `do_not_specialize` names, it looks at the type alone.
_compiled: dict[Any, Any] = {}
_MAX_COMPILED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the kernel is cut; no value depends on it.

    Attributes:
        block: Counters of a program, a power of two.
        num_warps: Warps of a program.
        rounds: Of Philox.
    """

    block: int = 1024
    num_warps: int = 4
    rounds: int = ROUNDS


def fill_with_triton(
    out: Tensor,
    window: Window,
    distribution: Distribution,
    key: Key,
    tuning: Tuning | None = None,
) -> None:
    """Fill a tensor with the values of a window of a larger one.

    Args:
        out: Contiguous, on a CUDA device; bfloat16, float16 or float32, of as many
            elements as the window.
        window: Which elements of the full tensor these are.
        distribution: What is drawn.
        key: The stream.
        tuning: How the work is cut.
    """
    if not window.numel:
        return
    tuning = tuning or Tuning()
    per_block = tuning.block * (4 if window.aligned else 1)
    grid = (-(-window.numel // per_block), 1, 1)
    cut = out.dtype, window.rows > 1, window.aligned, tuning
    sizes = window.numel, window.start, window.length, window.stride
    constants = _constants(distribution, *cut)
    arguments = (out, *sizes, *map(_signed, key), *constants.values())
    aligned = out.data_ptr() % _ALIGNMENT == 0
    kind = (constants["KIND"], *cut, out.device, aligned, *map(_specialized, sizes))
    with _on(out.device):
        compiled = _compiled.get(kind)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = fill_kernel[grid](
            *arguments,
            num_warps=tuning.num_warps,
            # A fused multiply-add would round once where torch rounds twice.
            enable_fp_fusion=False,
        )
        if not _INTERPRETED:
            if len(_compiled) >= _MAX_COMPILED:
                _compiled.clear()
            _compiled[kind] = compiled


def _specialized(size: int) -> tuple[bool, bool, bool]:
    """What Triton compiles a kernel anew for, of an integer."""
    return size == 1, size % _ALIGNMENT == 0, size < 1 << 31


@lru_cache(maxsize=256)
def _constants(
    distribution: Distribution,
    dtype: torch.dtype,
    has_rows: bool,
    aligned: bool,
    tuning: Tuning,
) -> dict[str, Any]:
    """Return what does not depend on the stream, in the order of the kernel's."""
    return _parameters(distribution, dtype) | {
        "ROWS": has_rows,
        "ALIGNED": aligned,
        "BLOCK": tuning.block,
        "ROUNDS": tuning.rounds,
        "EXACT": _INTERPRETED,
    }


def _on(device: torch.device) -> Any:
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _parameters(distribution: Distribution, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a distribution, by the kernel's names."""
    found: dict[str, Any] = {
        "mean": 0.0, "spread": 0.0, "split": 0, "below": 0.0, "below_step": 0.0,
        "above": 0.0, "above_step": 0.0, "least": 0.0, "greatest": 0.0, "KIND": 0,
    }  # fmt: skip
    if isinstance(distribution, Normal):
        return found | {"mean": distribution.mean, "spread": distribution.std}
    found["least"], found["greatest"] = distribution.bounds(dtype)
    if isinstance(distribution, Uniform):
        step = (distribution.high - distribution.low) * 2.0**-32
        return found | {"mean": distribution.low, "spread": step, "KIND": 1}
    sides = distribution.sides()
    return found | {
        "mean": distribution.mean,
        "spread": sides.spread,
        "split": _signed(sides.split),
        "below": sides.below,
        "below_step": sides.below_step,
        "above": sides.above,
        "above_step": sides.above_step,
        "KIND": 2,
    }


def _signed(word: int) -> int:
    """The 32-bit integer of the same bits: then its type does not depend on it."""
    return word - (1 << 32) if word >> 31 else word

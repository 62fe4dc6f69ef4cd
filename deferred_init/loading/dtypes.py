"""Which stored dtype may become which other on the way into a model."""

from __future__ import annotations

import torch

__all__ = ["cast_problem"]


def cast_problem(stored: torch.dtype, wanted: torch.dtype) -> str | None:
    """Say why a dtype cannot be cast to another without losing its meaning, or None.

    Real floating-point numbers become each other, rounded as `Tensor.to` does, and
    so do complex ones. Integers may only grow. 8-bit floats are codes that need a
    scale, which a cast does not know.

    >>> cast_problem(torch.float32, torch.bfloat16)
    >>> cast_problem(torch.float32, torch.int64).split(": ")[-1]
    'convert it there first'
    """
    if stored == wanted:
        return None
    text = f"is {wanted} in the model, but {stored} in the checkpoint"
    if _is_scaled(stored) or _is_scaled(wanted):
        return (
            f"{text}: 8-bit floats go with scales, which a cast ignores. Dequantize "
            "the checkpoint first, or use a recipe that quantizes"
        )
    if stored.is_complex and wanted.is_complex:
        return None
    if stored.is_floating_point and wanted.is_floating_point:
        return None
    if _is_integer(stored) and _is_integer(wanted):
        have, want = torch.iinfo(stored), torch.iinfo(wanted)
        if want.min <= have.min and have.max <= want.max:
            return None
    if {stored, wanted} == {torch.uint8, torch.bool}:
        return None
    return f"{text}: convert it there first"


def _is_scaled(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)

"""The dtype that a tensor ends with, and the bytes in it."""

from __future__ import annotations

import torch

from deferred_init.handlers.protocol import Request
from deferred_init.slots import Slot, SlotKind

__all__ = ["final_bytes", "final_dtype"]


def final_dtype(slot: Slot, request: Request) -> torch.dtype:
    """The dtype that a slot's tensor ends with: its own, or what was asked for.

    `dtype=` of the call wins over the recipe, and only floating-point tensors
    ever change.
    """
    own = slot.tensor.dtype
    if not own.is_floating_point or slot.tensor.element_size() == 1:
        return own
    if request.dtype is not None:
        return request.dtype
    if request.recipe is None:
        return own
    target = request.recipe.dtype.target(
        own,
        is_buffer=slot.kind is not SlotKind.PARAMETER,
        in_norm="norm" in type(slot.owner).__name__.lower(),
    )
    assert isinstance(target, torch.dtype)
    return target


def final_bytes(slot: Slot, request: Request) -> int:
    """Bytes of the elements of a slot's tensor in the dtype that it ends with."""
    return slot.tensor.numel() * final_dtype(slot, request).itemsize

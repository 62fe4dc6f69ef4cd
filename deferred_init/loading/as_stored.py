"""Quantized tensors that a checkpoint has as the model keeps them: bits and scales.

Their values alone would be quantized once more, by a scale that need not be the one
they were stored with: delayed scaling has a scale of its own, which a fresh model does
not know yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deferred_init.sources.pieces import Piece
from deferred_init.sources.protocol import TensorSource

__all__ = ["copy_as_stored", "special_tensor"]


def special_tensor(source: TensorSource, pieces: Sequence[Piece]) -> Tensor | None:
    """Return the tensor of a special class that one of the model's is all of, or None.

    Args:
        source: Where it is stored; one without a method `as_stored` has no such
            tensors.
        pieces: What the model's tensor is made of.
    """
    read = getattr(source, "as_stored", None)
    piece = pieces[0]
    whole = len(pieces) == 1 and not piece.transposed
    if read is None or not whole or piece.shape != piece.target_view:
        return None
    found: Tensor | None = read(piece.key)
    return None if found is None or found.shape != piece.shape else found


def copy_as_stored(stored: Tensor, tensor: Tensor) -> bool:
    """Copy a stored tensor into one of the same special class, as `copy_` does it.

    Args:
        stored: What is stored, on any device.
        tensor: A tensor of a special class, with memory.

    Returns:
        Whether it was copied; else its values have to be read.
    """
    if _format(stored) != _format(tensor):
        return False
    moved: Any = stored.to(tensor.device)
    with torch.no_grad():
        tensor.copy_(moved)
    if hasattr(tensor, "_high_precision_init_val"):
        # Transformer Engine hands it to the optimizer as the master weight.
        tensor._high_precision_init_val = moved.dequantize().cpu()
    return True


def _format(tensor: Any) -> tuple[object, ...]:
    """What two tensors have in common if the bits of one mean the same in the other."""
    kind = getattr(tensor, "_fp8_dtype", None)
    blocks = getattr(tensor, "_is_2D_scaled", None)
    return (
        type(tensor),
        tuple(tensor.shape),
        None if kind is None else int(kind),
        blocks,
    )

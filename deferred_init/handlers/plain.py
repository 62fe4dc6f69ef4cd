"""Allocator for ordinary dense tensors, Parameters and Python-only subclasses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from deferred_init.handlers.protocol import Request
from deferred_init.handlers.registry import add_allocator

__all__ = ["PlainAllocator", "dress"]


class PlainAllocator:
    """Allocates strided tensors; keeps class, dtype, sizes, strides and grad flag."""

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        """Say why the tensor cannot be allocated, or None."""
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return (
                "has no shape yet (a lazy module): run one dummy forward pass on the "
                "meta model first, or build the module with its sizes given"
            )
        if tensor.layout is not torch.strided:
            return (
                f"has layout {tensor.layout}, expected torch.strided: build the model "
                "inside `deferred_init(...)`, which records how it is made"
            )
        if tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested"
            return f"is a {kind} tensor, which cannot be made from its shape alone"
        if request.device.type == "mps" and tensor.dtype is torch.float64:
            return "is torch.float64, which the mps device does not have"
        return None

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Bytes of the elements in the given dtype."""
        return tensor.numel() * dtype.itemsize

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return uninitialized memory of the same class, sizes and strides."""
        data = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        return dress(tensor, data)


def dress(like: Tensor, data: Tensor) -> Tensor:
    """Give bare data the class and the grad flag of another tensor."""
    if type(like) is Tensor:
        return data.requires_grad_() if like.requires_grad else data
    return Tensor._make_subclass(type(like), data, like.requires_grad)


add_allocator(PlainAllocator(), Tensor, nn.Parameter)

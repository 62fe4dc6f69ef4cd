"""Allocator for Transformer Engine's own tensor types where they stand on meta."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from deferred_init.handlers.protocol import Request
from deferred_init.handlers.registry import add_allocator

__all__ = ["TETensorAllocator"]


class TETensorAllocator:
    """Vouches for tensors that a TE module makes by itself, whole.

    A grouped layer has such a tensor on meta already; nobody but its own
    `reset_parameters` can fill it.
    """

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        """Say why it cannot be made: never, since the module makes it."""
        return None

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Bytes of its elements."""
        return tensor.numel() * dtype.itemsize

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Refuse: such a tensor has no memory without values.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"a {type(tensor).__name__} is made by its module only")


def _grouped_tensor() -> type | None:
    for name in ("grouped_tensor", "storage.grouped_tensor", "grouped"):
        try:
            module = importlib.import_module(
                f"transformer_engine.pytorch.tensor.{name}"
            )
        except ModuleNotFoundError:
            continue
        found = getattr(module, "GroupedTensor", None)
        if isinstance(found, type):
            return found
    return None


_GROUPED = _grouped_tensor()
if _GROUPED is not None:
    add_allocator(TETensorAllocator(), _GROUPED)

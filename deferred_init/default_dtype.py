"""torch's default dtype for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["default_dtype"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of new floating-point tensors, and put it back at the end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

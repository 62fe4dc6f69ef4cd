"""Views that are rebuilt on other memory, as they were."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["view_like", "with_bits_of"]


def view_like(like: Tensor, base: Tensor) -> Tensor | None:
    """Rebuild a view on another base, with autograd's view relation.

    Args:
        like: A view, of which the geometry, the dtype and whether it is conjugated or
            negated count.
        base: A dense tensor whose storage it shall share.

    Returns:
        None if the two dtypes are no complex one and its real one; torch has no
        gradient through such views.
    """
    size, stride, offset = like.size(), like.stride(), like.storage_offset()
    if base.is_conj():  # a view of a view, and the two undo each other
        base = base.conj()
    if base.dtype == like.dtype:
        made = base.as_strided(size, stride, offset)
    elif base.is_complex() and base.dtype.to_real() == like.dtype:
        made = torch.view_as_real(base).as_strided(size, stride, offset)
    elif like.is_complex() and like.dtype.to_real() == base.dtype:
        doubled = [2 * each for each in stride]
        pairs = base.as_strided((*size, 2), (*doubled, 1), 2 * offset)
        made = torch.view_as_complex(pairs)
    else:
        return None
    return with_bits_of(like, made)


def with_bits_of(like: Tensor, data: Tensor) -> Tensor:
    """Return a view that is conjugated and negated exactly if another tensor is."""
    if like.is_conj() != data.is_conj():
        data = data.conj()
    return torch._neg_view(data) if like.is_neg() != data.is_neg() else data

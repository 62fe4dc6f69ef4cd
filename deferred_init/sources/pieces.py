"""Which part of which stored tensor goes to which part of a model's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "Sizes", "along", "whole"]

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a stored tensor, and where it goes.

    Both tensors are viewed with the same number of dims: stacking puts a matrix
    (viewed with a leading dim of 1) into one layer of a larger tensor.

    Attributes:
        key: The stored tensor.
        source_view: The shape that the stored tensor is viewed with.
        source_start: First index of the box in it.
        target_view: The shape that the model's tensor is viewed with.
        target_start: First index of the box in it.
        shape: The sizes of the box.
        transposed: Whether the stored tensor has its last two dims the other way
            round; the numbers above are those after turning it.
    """

    key: str
    source_view: Sizes
    source_start: Sizes
    target_view: Sizes
    target_start: Sizes
    shape: Sizes
    transposed: bool = False


def whole(key: str, shape: Sequence[int]) -> Piece:
    """Return the piece that is all of a tensor."""
    sizes = tuple(shape)
    zeros = (0,) * len(sizes)
    return Piece(
        key=key,
        source_view=sizes,
        source_start=zeros,
        target_view=sizes,
        target_start=zeros,
        shape=sizes,
    )


def along(
    key: str,
    dim: int,
    *,
    source_view: Sizes,
    source_at: int,
    target_view: Sizes,
    target_at: int,
    length: int,
) -> Piece:
    """Return a piece that is a range along one dim and everything along the others."""
    zeros = (0,) * len(source_view)
    return Piece(
        key=key,
        source_view=source_view,
        source_start=_with(zeros, dim, source_at),
        target_view=target_view,
        target_start=_with(zeros, dim, target_at),
        shape=_with(source_view, dim, length),
    )


def _with(sizes: Sizes, dim: int, value: int) -> Sizes:
    return (*sizes[:dim], value, *sizes[dim + 1 :])

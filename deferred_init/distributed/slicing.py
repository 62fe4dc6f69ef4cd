"""Which part of a full tensor a rank keeps: integer arithmetic, no communication.

[Note: Two ways to read a strided shard]
FSDP2 over tensor parallelism shards from right to left: first over the mesh axis of
tensor parallelism, then over its own axis, which stands further left. DTensor writes
this down as `_StridedShard(dim, split_factor)` and reads it from left to right: split
into `split_factor` pieces, split each, take one part of each. Where sizes divide
evenly both give the same rows. Where they do not, what FSDP2 has on its parameter is
the right-to-left split, so that one is tried first and taken if its shape is the
shape of the local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deferred_init.fast.window import Window

__all__ = ["Axis", "Region", "Segments", "copy_region", "region_of", "window_of"]

Segments = tuple[tuple[int, int], ...]
"""Half-open ranges of indices along one dim, in the order in which they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """How one mesh axis splits a tensor, and where this rank stands on it.

    Attributes:
        dim: The tensor dim that is split; None for a replica.
        size: Number of ranks along the axis.
        rank: This rank's coordinate on it.
        split_factor: Of a strided shard; None for an ordinary one.
    """

    dim: int | None
    size: int
    rank: int
    split_factor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The indices that a rank keeps, per tensor dim.

    Attributes:
        dims: For each dim the ranges that are kept.
        cut: Dim, start and length of the one range that makes the region; None if it
            takes more than one, or if the tensor is a scalar.
    """

    dims: tuple[Segments, ...]
    cut: tuple[int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(_length(segments) for segments in self.dims)


def region_of(
    shape: Sequence[int],
    axes: Sequence[Axis],
    local_shape: Sequence[int] | None = None,
) -> Region:
    """Say what a rank keeps of a tensor.

    Args:
        shape: The shape of the full tensor.
        axes: The axes of the mesh, in order.
        local_shape: The shape that the local tensor has; decides between the two
            readings of a strided shard.

    Raises:
        ValueError: If no reading gives `local_shape`.
    """
    readings = [_right_to_left(shape, axes), _left_to_right(shape, axes)]
    expected = readings[0].shape if local_shape is None else tuple(local_shape)
    for region in readings:
        if region.shape == expected:
            return replace(region, cut=_single_cut(shape, region.dims))
    raise ValueError(
        f"the local tensor has shape {expected}, but the placements give "
        f"{readings[-1].shape} of {tuple(shape)}"
    )


def _single_cut(
    shape: Sequence[int], dims: tuple[Segments, ...]
) -> tuple[int, int, int] | None:
    """See `Region.cut`; what is all of a tensor is a range of its first dim."""
    whole = [((0, size),) for size in shape]
    cut = [dim for dim, kept in enumerate(dims) if kept != whole[dim]]
    if len(cut) > 1 or not dims:
        return None
    dim = cut[0] if cut else 0
    kept = dims[dim] or ((0, 0),)
    (start, end), *more = kept
    return None if more else (dim, start, end - start)


def window_of(shape: Sequence[int], region: Region) -> Window | None:
    """Return a region as rows at equal distances, or None if it is not.

    It is if one dim at most is cut, to one range of indices: of each index of the dims
    before, the range with all of the dims behind.
    """
    if 0 in region.shape:
        return Window(0, 0, 0, 0)
    cut = [
        dim
        for dim, kept in enumerate(region.dims)
        if sum(end - start for start, end in kept) < shape[dim]
    ]
    if not cut:
        return Window.of_whole(math.prod(shape))
    if len(cut) > 1 or len(region.dims[cut[0]]) != 1:
        return None
    (start, end), dim = region.dims[cut[0]][0], cut[0]
    inner = math.prod(shape[dim + 1 :])
    return Window(
        start=start * inner,
        rows=math.prod(shape[:dim]),
        length=(end - start) * inner,
        stride=shape[dim] * inner,
    )


def copy_region(target: Tensor, full: Tensor, region: Region) -> None:
    """Copy the region of a full tensor into a local one of the region's shape."""
    if target.numel() == 0:
        return
    with torch.no_grad():
        _copy(target, full, region.dims, 0)


def _copy(target: Tensor, full: Tensor, dims: tuple[Segments, ...], dim: int) -> None:
    if dim == len(dims):
        target.copy_(full)
        return
    at = 0
    for start, end in dims[dim]:
        length = end - start
        part, kept = target, full
        if length < target.size(dim):
            part = target.narrow(dim, at, length)
        if length < full.size(dim):
            kept = full.narrow(dim, start, length)
        _copy(part, kept, dims, dim + 1)
        at += length


def _left_to_right(shape: Sequence[int], axes: Sequence[Axis]) -> Region:
    dims: list[Segments] = [((0, size),) for size in shape]
    for axis in axes:
        if axis.dim is None:
            continue
        kept = dims[axis.dim]
        if axis.split_factor is None:
            dims[axis.dim] = _chunk(kept, axis.size, axis.rank)
            continue
        pieces = [
            _chunk(_chunk(kept, axis.split_factor, piece), axis.size, axis.rank)
            for piece in range(axis.split_factor)
        ]
        dims[axis.dim] = _merged([part for piece in pieces for part in piece])
    return Region(dims=tuple(dims))


def _right_to_left(shape: Sequence[int], axes: Sequence[Axis]) -> Region:
    """Split by ordinary shards first, then by strided ones as if ordinary."""
    plain = [axis for axis in axes if axis.split_factor is None]
    strided = [
        Axis(dim=axis.dim, size=axis.size, rank=axis.rank)
        for axis in axes
        if axis.split_factor is not None
    ]
    return _left_to_right(shape, [*plain, *reversed(strided)])


def _chunk(segments: Segments, num_chunks: int, index: int) -> Segments:
    """Take one chunk of the concatenated ranges, as `torch.chunk` cuts them."""
    total = _length(segments)
    step = -(-total // num_chunks)
    first, last = min(index * step, total), min((index + 1) * step, total)
    taken = []
    offset = 0
    for start, end in segments:
        low, high = max(first - offset, 0), min(last - offset, end - start)
        if low < high:
            taken.append((start + low, start + high))
        offset += end - start
    return tuple(taken)


def _merged(parts: Sequence[tuple[int, int]]) -> Segments:
    """Join ranges that touch."""
    joined: list[tuple[int, int]] = []
    for start, end in parts:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def _length(segments: Segments) -> int:
    return sum(end - start for start, end in segments)

"""Boxes: ranges of indices along every dim, and when they are one run of bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deferred_init.sources.pieces import Piece, Sizes

__all__ = ["Box", "Cut", "Segments", "cut"]

Segments = tuple[tuple[int, int], ...]
_ALL_OF_ONE: Segments = ((0, 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box in a tensor.

    Attributes:
        view: The shape of the tensor.
        start: The first index of the box.
        shape: The sizes of the box.
    """

    view: Sizes
    start: Sizes
    shape: Sizes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def turned(self) -> Box:
        """Return it with the last two dims the other way round."""

        def turn(sizes: Sizes) -> Sizes:
            return (*sizes[:-2], sizes[-1], sizes[-2])

        return Box(view=turn(self.view), start=turn(self.start), shape=turn(self.shape))

    def run(self) -> int | None:
        """Return the index of the first element if the box is one run, else None.

        It is if, after leading dims of which it has one index, it has all of every
        dim but the first of the rest.
        """
        dims = len(self.view)
        first = next((i for i in range(dims) if self.shape[i] != 1), dims)
        if self.shape[first + 1 :] != self.view[first + 1 :]:
            return None
        index = 0
        for start, length in zip(self.start, self.view, strict=True):
            index = index * length + start
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A box of a stored tensor, and the box of local memory that it fills.

    Attributes:
        source: In the stored tensor, as it is stored.
        target: In local memory.
        transposed: Whether the last two dims change places on the way.
    """

    source: Box
    target: Box
    transposed: bool = False


def cut(piece: Piece, shape: Sizes, region: Sequence[Segments] | None) -> Iterator[Cut]:
    """Cut a piece into the parts that a rank keeps.

    Args:
        piece: What is stored and where it goes in the whole tensor.
        shape: Of the whole tensor.
        region: For each dim the ranges that are kept, in order; None for all.
    """
    dims = _in_view(piece.target_view, shape, region)
    local = tuple(sum(end - start for start, end in kept) for kept in dims)
    for chosen in itertools.product(*map(_placed, dims)):
        starts, at, sizes = [], [], []
        for dim, (first, last, offset) in enumerate(chosen):
            begin = piece.target_start[dim]
            low = max(first, begin)
            high = min(last, begin + piece.shape[dim])
            starts.append(piece.source_start[dim] + low - begin)
            at.append(offset + low - first)
            sizes.append(high - low)
        if all(size > 0 for size in sizes):
            box = tuple(sizes)
            source = Box(view=piece.source_view, start=tuple(starts), shape=box)
            yield Cut(
                source=source.turned() if piece.transposed else source,
                target=Box(view=local, start=tuple(at), shape=box),
                transposed=piece.transposed,
            )


def _in_view(
    view: Sizes, shape: Sizes, region: Sequence[Segments] | None
) -> list[Segments]:
    """Return the ranges per dim of the view, which may have further dims of 1."""
    if region is None:
        return [((0, length),) for length in view]
    dims: list[Segments] = []
    following = 0
    for length in view:
        if following < len(shape) and shape[following] == length:
            dims.append(region[following])
            following += 1
        else:
            dims.append(_ALL_OF_ONE)
    return dims


def _placed(kept: Segments) -> list[tuple[int, int, int]]:
    """Add to each range where it begins in local memory."""
    found, offset = [], 0
    for start, end in kept:
        found.append((start, end, offset))
        offset += end - start
    return found

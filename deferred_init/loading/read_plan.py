"""From what must be moved to chunks that are read: by offset, joined, of bounded size.

A chunk is one read of consecutive bytes. What it holds *lands* in one or several
places, as it is or cast, whole or a box of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deferred_init.loading.boxes import Box, Cut
from deferred_init.sources.pieces import Sizes
from deferred_init.sources.protocol import ByteFile, TensorInfo

__all__ = ["Chunk", "Landing", "join", "landings", "place_of", "select"]

_GAP_BYTES = 1 << 16
"""A gap up to this is read as well, if that saves a read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landing:
    """Bytes of a chunk and the memory they go to.

    Attributes:
        key: What errors call it.
        file: Where the bytes are.
        offset: Of the first byte in the file.
        dtype: As stored.
        rows: The shape of what is read.
        box: The part of it that lands.
        target: Memory of the box's shape.
    """

    key: str
    file: ByteFile
    offset: int
    dtype: torch.dtype
    rows: Sizes
    box: Box
    target: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return math.prod(self.rows) * self.dtype.itemsize

    @property
    def is_copy(self) -> bool:
        """Whether it lands byte by byte in one run."""
        return (
            self.box.shape == self.rows
            and self.dtype == self.target.dtype
            and self.target.is_contiguous()
        )

    def as_rows(self, read: Tensor) -> Tensor:
        """Return the bytes that were read as elements."""
        return read.view(self.dtype).view(self.rows)

    def select(self, read: Tensor) -> Tensor:
        """Return what lands, of the bytes that were read."""
        return select(self.as_rows(read), self.box)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """One read.

    Attributes:
        file: Where.
        offset: Of the first byte.
        num_bytes: How many.
        landings: What they are for; by offset.
    """

    file: ByteFile
    offset: int
    num_bytes: int
    landings: tuple[Landing, ...]


def landings(
    key: str, info: TensorInfo, part: Cut, memory: Tensor, chunk_bytes: int
) -> Iterator[Landing]:
    """Divide one cut into landings of bounded size.

    Args:
        key: The stored tensor.
        info: Its shape, dtype and extent.
        part: The box of it that is wanted, and where it goes.
        memory: The local tensor.
        chunk_bytes: Upper bound for what is read at once; a single row may exceed it.
    """
    assert info.extent is not None
    file, begin = info.extent.file, info.extent.offset
    size = info.dtype.itemsize
    from_, to = part.source.run(), part.target.run()
    straight = memory.is_contiguous() and not part.transposed
    if from_ is not None and to is not None and straight:
        flat = memory.view(-1)
        step = max(1, chunk_bytes // 64 * 64 // size)
        for done in range(0, part.source.numel, step):
            rows = (min(step, part.source.numel - done),)
            yield Landing(
                key=key,
                file=file,
                offset=begin + (from_ + done) * size,
                dtype=info.dtype,
                rows=rows,
                box=Box(view=rows, start=(0,), shape=rows),
                target=flat[to + done : to + done + rows[0]],
            )
        return
    source = part.source
    below = source.view[1:]
    row = math.prod(below) * size
    step = max(1, chunk_bytes // row)
    target = place_of(part, memory)
    for done in range(0, source.shape[0], step):
        count = min(step, source.shape[0] - done)
        read = (count, *below)
        yield Landing(
            key=key,
            file=file,
            offset=begin + (source.start[0] + done) * row,
            dtype=info.dtype,
            rows=read,
            box=Box(
                view=read,
                start=(0, *source.start[1:]),
                shape=(count, *source.shape[1:]),
            ),
            target=target[done : done + count],
        )


def join(found: Iterable[Landing], chunk_bytes: int) -> list[Chunk]:
    """Order landings by file and offset, and join neighbours into chunks."""
    order: dict[int, int] = {}
    items = list(found)
    for item in items:
        order.setdefault(id(item.file), len(order))
    items.sort(key=lambda item: (order[id(item.file)], item.offset))
    chunks: list[Chunk] = []
    group: list[Landing] = []
    end = 0
    for item in items:
        if group and not _belongs(item, group[0], end, chunk_bytes):
            chunks.append(_chunk(group, end))
            group = []
        end = max(end, item.offset + item.num_bytes) if group else _end(item)
        group.append(item)
    if group:
        chunks.append(_chunk(group, end))
    return chunks


def place_of(part: Cut, memory: Tensor) -> Tensor:
    """Return the view of local memory that a cut fills, in the order of the source."""
    target = select(memory.view(part.target.view), part.target)
    return target.mT if part.transposed else target


def select(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a tensor."""
    for dim, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _belongs(item: Landing, first: Landing, end: int, chunk_bytes: int) -> bool:
    into = item.offset - first.offset
    return (
        item.file is first.file
        and item.offset - end <= _GAP_BYTES
        and max(end, _end(item)) - first.offset <= chunk_bytes
        and into % item.dtype.itemsize == 0
    )


def _chunk(group: list[Landing], end: int) -> Chunk:
    start = group[0].offset
    return Chunk(
        file=group[0].file,
        offset=start,
        num_bytes=end - start,
        landings=tuple(group),
    )


def _end(item: Landing) -> int:
    return item.offset + item.num_bytes

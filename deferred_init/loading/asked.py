"""Tensors that only their source can read: one after the other, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from deferred_init.loading.boxes import Box, Cut
from deferred_init.loading.read_plan import place_of, select
from deferred_init.sources.protocol import TensorInfo, TensorSource

__all__ = ["Asked", "asked_for"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Rows of a tensor to ask a source for.

    Attributes:
        source: Whom to ask.
        key: The stored tensor.
        info: Its shape and dtype.
        start: The first row.
        stop: The row after the last.
        view: The shape that these rows are viewed with.
        box: The part of them that lands.
        target: Memory of the box's shape.
    """

    source: TensorSource
    key: str
    info: TensorInfo
    start: int
    stop: int
    view: tuple[int, ...]
    box: Box
    target: Tensor

    def land(self) -> None:
        """Ask, check what comes and copy it.

        Raises:
            OSError: The source gave something other than it had promised.
        """
        found = self.source.read(self.key, self.start, self.stop).detach()
        promised = (
            (self.stop - self.start, *self.info.shape[1:]) if self.info.shape else ()
        )
        if tuple(found.shape) != promised or found.dtype != self.info.dtype:
            raise OSError(
                f"the source gave {found.dtype} of shape {tuple(found.shape)}, it had "
                f"promised {self.info.dtype} of shape {promised}"
            )
        self.target.copy_(select(found.reshape(self.view), self.box))


def asked_for(
    source: TensorSource,
    key: str,
    part: Cut,
    memory: Tensor,
    chunk_bytes: int,
) -> Iterator[Asked]:
    """Divide one cut into reads of bounded size, by rows of the stored tensor.

    Args:
        source: Whom to ask.
        key: The stored tensor.
        part: The box of it that is wanted, and where it goes.
        memory: The local tensor.
        chunk_bytes: Upper bound for what is read at once, where rows allow it.
    """
    info, box = source.tensors[key], part.source
    target = place_of(part, memory)
    if not info.shape or not _shares_rows(info.shape, box.view):
        # Viewed in another way: all of it is read.
        stop = info.shape[0] if info.shape else 1
        yield Asked(
            source=source,
            key=key,
            info=info,
            start=0,
            stop=stop,
            view=box.view,
            box=box,
            target=target,
        )
        return
    row_bytes = max(1, info.num_bytes // max(1, info.shape[0]))
    step = max(1, chunk_bytes // row_bytes)
    for done in range(0, box.shape[0], step):
        count = min(step, box.shape[0] - done)
        view = (count, *box.view[1:])
        yield Asked(
            source=source,
            key=key,
            info=info,
            start=box.start[0] + done,
            stop=box.start[0] + done + count,
            view=view,
            box=Box(
                view=view, start=(0, *box.start[1:]), shape=(count, *box.shape[1:])
            ),
            target=target[done : done + count],
        )


def _shares_rows(shape: Sequence[int], view: Sequence[int]) -> bool:
    return bool(view) and shape[0] == view[0]

"""How much an engine uses for speed."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["EngineOptions"]

_MOST_READERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How much is used for speed.

    Attributes:
        num_readers: Threads; None takes as many as there are cores, up to 16.
        buffer_bytes: Size of one buffer, and of the largest read.
        num_buffers: Buffers per thread, on a GPU target.
        asked_bytes: What a source that has no byte offsets is asked for at once.
        steps_ahead: How many steps, of a quarter of a gigabyte or one tensor each,
            are begun when the first of them is waited for.
    """

    num_readers: int | None = None
    buffer_bytes: int = 1 << 23
    num_buffers: int = 2
    asked_bytes: int = 1 << 28
    steps_ahead: int = 8

    def readers(self) -> int:
        """Return the number of threads."""
        if self.num_readers:
            return self.num_readers
        return max(1, min(_MOST_READERS, _cores()))


def _cores() -> int:
    """Cores that this process may use, which are fewer than there are in a job."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""When what happened while an engine ran; for logs and for the benchmark."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

__all__ = ["Timeline"]


@dataclass(slots=True, eq=False)
class Timeline:
    """Seconds since the engine was made, and how much it read.

    Attributes:
        first_read_s: The first read began, with its buffer ready.
        last_read_s: The last one ended.
        closed_s: The last copy had arrived and the threads had ended.
        num_reads: How many reads.
        num_bytes: Bytes read.
    """

    first_read_s: float | None = None
    last_read_s: float = 0.0
    closed_s: float = 0.0
    num_reads: int = 0
    num_bytes: int = 0
    _start: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_begins(self) -> None:
        """Note that a buffer is ready and a read begins."""
        if self.first_read_s is None:
            self.first_read_s = time.perf_counter() - self._start

    def read_ended(self, num_bytes: int) -> None:
        """Note the end of a read."""
        with self._lock:
            self.last_read_s = time.perf_counter() - self._start
            self.num_reads += 1
            self.num_bytes += num_bytes

    def closed(self) -> None:
        """Note the end of everything."""
        self.closed_s = time.perf_counter() - self._start

    def __str__(self) -> str:
        """Spell it in one line."""
        return (
            f"{self.num_bytes / 1e6:.1f} MB in {self.num_reads} reads; first read "
            f"after {self.first_read_s or 0:.4f} s, last one ended at "
            f"{self.last_read_s:.4f} s, all arrived at {self.closed_s:.4f} s"
        )

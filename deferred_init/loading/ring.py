"""A bounded ring of pinned buffers between the file and a GPU."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deferred_init.loading.engine_options import EngineOptions
from deferred_init.loading.read_plan import Chunk
from deferred_init.sources.byte_files import memory_of

__all__ = ["Ring", "Slot"]

Make = Callable[[int], Tensor]


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Slot:
    """One buffer, made when it is first used.

    Attributes:
        memory: The buffer; may be larger than what was read into it.
        busy: Passes when the last copy from it has ended.
    """

    __slots__ = ("_view", "busy", "memory")

    def __init__(self) -> None:
        self.memory: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.busy: torch.cuda.Event | None = None
        self._view = memoryview(b"")

    def grow(self, num_bytes: int, make: Make) -> None:
        """Make a buffer of this size, unless there is one."""
        if self.memory.numel() < num_bytes:
            self._view.release()
            self.memory = make(num_bytes)
            self._view = memory_of(self.memory)

    def read(self, chunk: Chunk) -> None:
        """Read a chunk to the begin of the buffer."""
        chunk.file.read_into(chunk.offset, self._view[: chunk.num_bytes])


class Ring:
    """Buffers that go round: taken, read into, copied from, given back.

    Args:
        options: How many there are, and their size.
        make: Makes memory; pinned unless told otherwise.
    """

    def __init__(self, options: EngineOptions, make: Make = _pinned) -> None:
        self._buffer_bytes = options.buffer_bytes
        self._make = make
        self._expected = 0
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for _ in range(options.readers() * options.num_buffers):
            self._free.put(Slot())

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Say what will be read, so that little is pinned for a small model."""
        self._expected += sum(chunk.num_bytes for chunk in chunks)

    def take(self, num_bytes: int) -> Slot:
        """Return the buffer that was given back first, when its copies have ended.

        Args:
            num_bytes: What it has to hold; may exceed the usual size.

        Raises:
            RuntimeError: The ring was closed, and no buffer will come any more.
        """
        slot = self._free.get()
        if slot is None:
            self._free.put(None)  # for the next one that waits
            raise RuntimeError("loading was stopped")
        try:
            if slot.busy is not None:
                slot.busy.synchronize()
                slot.busy = None
            usual = min(self._buffer_bytes, self._expected)
            slot.grow(max(num_bytes, usual), self._make)
        except BaseException:
            self._free.put(slot)
            raise
        return slot

    def close(self) -> None:
        """Let nobody wait for a buffer any longer."""
        self._free.put(None)

    def give_back(self, slot: Slot) -> None:
        """Put a buffer at the end of the line."""
        self._free.put(slot)

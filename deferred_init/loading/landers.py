"""How a chunk gets from its file to its places: on the CPU, or on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.loading.read_plan import Chunk, Landing
from deferred_init.loading.ring import Slot
from deferred_init.sources.byte_files import memory_of

__all__ = ["CpuLander", "CudaLander"]


class CpuLander:
    """Reads straight into place where nothing is cast, else by way of one buffer.

    Args:
        buffer_bytes: Size of the buffer; taken only when it is needed.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffer: Tensor | None = None

    def land(self, chunk: Chunk) -> None:
        """Read a chunk into its places and, where needed, cast."""
        first = chunk.landings[0]
        if len(chunk.landings) == 1 and first.is_copy:
            chunk.file.read_into(chunk.offset, memory_of(first.target))
            return
        buffer = self._take(chunk.num_bytes)
        chunk.file.read_into(chunk.offset, memory_of(buffer))
        for landing in chunk.landings:
            landing.target.copy_(landing.select(_part(buffer, chunk, landing)))

    def _take(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            size = max(num_bytes, self._buffer_bytes)
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:num_bytes]


class CudaLander:  # pragma: no cover - needs CUDA
    """Issues copies and casts on a stream of its own, which it makes current.

    To be made in the thread that uses it: device and stream are the thread's.

    Args:
        device: The CUDA device.
        buffer_bytes: Usual size of the staging buffer, taken only when it is needed.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        torch.cuda.set_device(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)
        self._buffer_bytes = buffer_bytes
        self._staging: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def land(
        self, chunk: Chunk, slot: Slot, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Issue what brings a chunk to its places.

        Args:
            chunk: What was read.
            slot: Where to; busy until what is returned has passed.
            ready: Passes when the places may be written.

        Returns:
            What passes when the chunk has arrived.
        """
        if ready is not None and ready is not self._ready:
            self._stream.wait_event(ready)
            self._ready = ready
        for landing in chunk.landings:
            self._issue(landing, _part(slot.memory, chunk, landing))
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        slot.busy = event
        return event

    def finish(self) -> None:
        """Wait for the stream; an error of a copy surfaces here at the latest."""
        self._stream.synchronize()

    def _issue(self, landing: Landing, read: Tensor) -> None:
        if landing.is_copy:
            landing.target.copy_(landing.as_rows(read), non_blocking=True)
            return
        # The stream's order keeps the next one from being staged before this is used.
        if self._staging is None or self._staging.numel() < read.numel():
            size = max(read.numel(), self._buffer_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=self._device)
        staged = self._staging[: read.numel()]
        staged.copy_(read, non_blocking=True)
        landing.target.copy_(landing.select(staged), non_blocking=True)


def _part(buffer: Tensor, chunk: Chunk, landing: Landing) -> Tensor:
    """Return the bytes of a chunk that one landing is about."""
    start = landing.offset - chunk.offset
    return buffer[start : start + landing.num_bytes]

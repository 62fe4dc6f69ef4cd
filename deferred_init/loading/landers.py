"""How a chunk gets from its file to its places: on the CPU, or on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from deferred_init.loading.read_plan import Chunk, Landing
from deferred_init.sources.byte_files import memory_of

__all__ = ["CpuLander", "CudaLander", "Lander"]

Event: TypeAlias = torch.cuda.Event


class Lander(Protocol):
    """What one thread uses to land chunks, one after the other."""

    def land(
        self, chunk: Chunk, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Read a chunk and bring it to its places.

        Args:
            chunk: What to read.
            ready: Passes when the places may be written.

        Returns:
            What passes when the chunk has arrived, or None if it has.
        """
        ...

    def finish(self) -> None:
        """Wait for everything that is under way."""
        ...


class CpuLander:
    """Reads straight into place where nothing is cast, else by way of one buffer.

    Args:
        buffer_bytes: Size of the buffer; taken only when it is needed.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffer: Tensor | None = None

    def land(
        self, chunk: Chunk, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Read and, where needed, cast; see `Lander`."""
        first = chunk.landings[0]
        if len(chunk.landings) == 1 and first.is_copy:
            chunk.file.read_into(chunk.offset, memory_of(first.target))
            return None
        buffer = self._take(chunk.num_bytes)
        chunk.file.read_into(chunk.offset, memory_of(buffer))
        for landing in chunk.landings:
            landing.target.copy_(landing.select(_part(buffer, chunk, landing)))
        return None

    def finish(self) -> None:
        """Do nothing: everything has arrived."""

    def _take(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            size = max(num_bytes, self._buffer_bytes)
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:num_bytes]


@dataclass(slots=True, kw_only=True, eq=False)
class _Buffer:
    pinned: Tensor | None = None
    staging: Tensor | None = None
    busy: Event | None = None


class CudaLander:
    """Reads into pinned buffers in turn, and copies from them on a stream of its own.

    Args:
        device: The CUDA device.
        buffer_bytes: Size of a buffer.
        num_buffers: How many there are.
    """

    def __init__(
        self, device: torch.device, buffer_bytes: int, num_buffers: int
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer_bytes = buffer_bytes
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._turn = 0

    def land(
        self, chunk: Chunk, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Read, then issue copies and casts; see `Lander`."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        if buffer.busy is not None:
            buffer.busy.synchronize()
        pinned = self._pinned(buffer, chunk.num_bytes)
        chunk.file.read_into(chunk.offset, memory_of(pinned))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for landing in chunk.landings:
                self._issue(landing, _part(pinned, chunk, landing), buffer)
            buffer.busy = self._stream.record_event()
        return buffer.busy

    def finish(self) -> None:
        """Wait for the stream; an error of a copy surfaces here at the latest."""
        self._stream.synchronize()

    def _issue(self, landing: Landing, read: Tensor, buffer: _Buffer) -> None:
        if landing.is_copy:
            landing.target.copy_(landing.select(read), non_blocking=True)
            return
        if buffer.staging is None or buffer.staging.numel() < read.numel():
            size = max(read.numel(), self._buffer_bytes)
            buffer.staging = torch.empty(size, dtype=torch.uint8, device=self._device)
        staged = buffer.staging[: read.numel()]
        staged.copy_(read, non_blocking=True)
        landing.target.copy_(landing.select(staged), non_blocking=True)

    def _pinned(self, buffer: _Buffer, num_bytes: int) -> Tensor:
        if buffer.pinned is None or buffer.pinned.numel() < num_bytes:
            size = max(num_bytes, self._buffer_bytes)
            buffer.pinned = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        return buffer.pinned[:num_bytes]


def _part(buffer: Tensor, chunk: Chunk, landing: Landing) -> Tensor:
    """Return the bytes of a chunk that one landing is about."""
    start = landing.offset - chunk.offset
    return buffer[start : start + landing.num_bytes]

"""The engine: reader threads that take chunks from a queue and land them.

[Note: How bytes reach a GPU]
A thread owns a few pinned buffers and a stream. It reads a chunk into a buffer while
the copies from its other buffers are still under way, then issues the copies of this
one: straight into the parameter where nothing is to be cast, else by way of a staging
buffer on the GPU, so that a cast costs no time on the host and no pageable copy. A
buffer is written again only when the event behind its copies has passed. Memory is
bounded by threads x buffers x their size, on either side, whatever is loaded.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from deferred_init.errors import listing
from deferred_init.loading.asked import Asked
from deferred_init.loading.landers import CpuLander, CudaLander, Lander
from deferred_init.loading.read_plan import Chunk

__all__ = ["Batch", "Engine", "EngineOptions"]

_WAKE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How much is used for speed.

    Attributes:
        num_readers: Threads; None takes up to 8, and not more than there are cores.
        buffer_bytes: Size of one buffer, and of the largest read.
        num_buffers: Buffers per thread, on a GPU target.
        asked_bytes: What a source that has no byte offsets is asked for at once.
    """

    num_readers: int | None = None
    buffer_bytes: int = 1 << 24
    num_buffers: int = 2
    asked_bytes: int = 1 << 28

    def readers(self) -> int:
        """Return the number of threads."""
        return self.num_readers or max(1, min(8, os.cpu_count() or 1))


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """What is loaded together: the part of one step of the plan.

    Attributes:
        chunks: Reads that any thread may do, in any order.
        asked: Reads that one thread does, in order.
        left: How many of either are not done.
        ready: Passes when the memory may be written (a CUDA event).
        landed: Pass when what was issued has arrived (CUDA events).
    """

    chunks: Sequence[Chunk]
    asked: Sequence[Asked] = ()
    left: int = 0
    ready: torch.cuda.Event | None = None
    landed: list[torch.cuda.Event] = field(default_factory=list)


class Engine:
    """Reads batches in the background; whoever makes one has to close it.

    Args:
        device: Where everything goes.
        options: Threads and buffers.
    """

    def __init__(self, device: torch.device, options: EngineOptions) -> None:
        self._device = device
        self._options = options
        self._queue: queue.SimpleQueue[tuple[Batch, Chunk] | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[tuple[Batch, Asked] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._num_readers = 0
        self._asking = False

    def submit(self, batch: Batch) -> None:
        """Begin with a batch, once those submitted before are under way."""
        batch.left = len(batch.chunks) + len(batch.asked)
        if self._device.type == "cuda":
            batch.ready = torch.cuda.current_stream(self._device).record_event()
        wanted = min(self._options.readers(), len(batch.chunks))
        while self._num_readers < wanted:
            self._num_readers += 1
            self._start(self._read_chunks)
        if batch.asked and not self._asking:
            self._asking = True
            self._start(self._read_asked)
        for chunk in batch.chunks:
            self._queue.put((batch, chunk))
        for item in batch.asked:
            self._asked.put((batch, item))

    def wait(self, batch: Batch) -> None:
        """Wait until a batch has landed, or is ordered before the current stream.

        Raises:
            OSError: A read failed; names the file and the key.
        """
        with self._changed:
            while batch.left and self._failure is None:
                self._changed.wait(_WAKE_S)
        self.check()
        for event in batch.landed:
            torch.cuda.current_stream(self._device).wait_event(event)
        batch.landed.clear()

    def close(self) -> None:
        """Stop the threads, dropping what they have not begun."""
        self._stopping = True
        for _ in self._threads:
            self._queue.put(None)
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def check(self) -> None:
        """Raise what went wrong after the last wait.

        Raises:
            OSError, RuntimeError: A read or a copy failed.
        """
        if self._failure is not None:
            raise self._failure

    def _start(self, work: Callable[[], None]) -> None:
        name = f"deferred_init {work.__name__} {len(self._threads)}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read_chunks(self) -> None:
        """Land chunks until told to stop; what one thread does."""
        lander: Lander | None = None
        try:
            lander = self._lander()
            while (work := self._queue.get()) is not None and not self._stopping:
                batch, chunk = work
                try:
                    event = lander.land(chunk, batch.ready)
                except Exception as error:
                    keys = listing([each.key for each in chunk.landings])
                    raise OSError(
                        f"reading {keys} from {chunk.file.name} failed: {error}"
                    ) from error
                self._done(batch, event)
        except BaseException as error:  # noqa: BLE001 - handed to the one that waits
            self._fail(error)
        finally:
            self._finish(lander)

    def _finish(self, lander: Lander | None) -> None:
        """Let nothing be under way when a thread ends: memory may be freed then."""
        try:
            if lander is not None:
                lander.finish()
        except RuntimeError as error:
            self._fail(error)

    def _read_asked(self) -> None:
        """Ask sources until told to stop; what one thread does."""
        try:
            with _on_stream(self._device) as stream:
                while (work := self._asked.get()) is not None and not self._stopping:
                    batch, item = work
                    try:
                        if stream is not None and batch.ready is not None:
                            stream.wait_event(batch.ready)
                        item.land()
                    except Exception as error:
                        raise OSError(
                            f"reading `{item.key}` from {item.source.name} failed: "
                            f"{type(error).__name__}: {error}"
                        ) from error
                    self._done(batch, None if stream is None else stream.record_event())
        except BaseException as error:  # noqa: BLE001 - handed to the one that waits
            self._fail(error)

    def _done(self, batch: Batch, event: torch.cuda.Event | None) -> None:
        with self._changed:
            if event is not None:
                batch.landed.append(event)
            batch.left -= 1
            if batch.left == 0:
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._stopping = True
            self._changed.notify_all()

    def _lander(self) -> Lander:
        if self._device.type == "cuda":
            return CudaLander(
                self._device, self._options.buffer_bytes, self._options.num_buffers
            )
        return CpuLander(self._options.buffer_bytes)


@contextmanager
def _on_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Let the body issue its work on a stream of its own, on a CUDA device."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield stream
    finally:
        stream.synchronize()

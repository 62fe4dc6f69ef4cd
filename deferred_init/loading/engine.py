"""The engine: reader threads that take chunks from a queue, and what lands them.

[Note: How bytes reach a GPU]
Readers do nothing but read: a chunk each, into a buffer of a ring of pinned memory,
without the interpreter's lock. One more thread issues all copies on one stream:
straight into the parameter where nothing is to be cast, else by way of a staging buffer
on the GPU, so that a cast costs no time on the host and no pageable copy. A buffer is
written again only when the event behind its copies has passed. Memory is bounded by the
ring and one staging buffer, whatever is loaded.

Why not each reader its own copies: calls into torch give up the interpreter's lock and
take it back several times each, and sixteen threads that do so wait for each other
more than for the file.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from deferred_init.errors import listing
from deferred_init.loading.asked import Asked
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.loading.landers import CpuLander, CudaLander
from deferred_init.loading.read_plan import Chunk
from deferred_init.loading.ring import Ring, Slot
from deferred_init.loading.timeline import Timeline

__all__ = ["Batch", "Engine"]

Work = TypeVar("Work")

_WAKE_S = 0.2


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

    Attributes:
        timeline: When what happened.
    """

    def __init__(self, device: torch.device, options: EngineOptions) -> None:
        self._device = device
        self._options = options
        self._queue: queue.SimpleQueue[tuple[Batch, Chunk] | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[tuple[Batch, Asked] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[Batch, Chunk, Slot] | None]
        self._arrived = queue.SimpleQueue()
        self._ring = Ring(options) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._issuers: list[threading.Thread] = []
        self._num_readers = 0
        self._asking = False
        self.timeline = Timeline()

    def submit(self, batch: Batch) -> None:
        """Begin with a batch, once those submitted before are under way."""
        batch.left = len(batch.chunks) + len(batch.asked)
        if self._device.type == "cuda":
            batch.ready = torch.cuda.current_stream(self._device).record_event()
        if self._ring is not None:
            self._ring.expect(batch.chunks)
        for chunk in batch.chunks:
            self._queue.put((batch, chunk))
        for item in batch.asked:
            self._asked.put((batch, item))
        if batch.chunks and self._ring is not None and not self._issuers:
            _start(self._issue_copies, self._issuers)
        read = self._read_to_places if self._ring is None else self._read_to_ring
        while self._num_readers < min(self._options.readers(), len(batch.chunks)):
            self._num_readers += 1
            _start(partial(self._guarded, read), self._threads)
        if batch.asked and not self._asking:
            self._asking = True
            _start(partial(self._guarded, self._read_asked), self._threads)

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
        self._queue.put(None)
        self._asked.put(None)
        if self._ring is not None:
            self._ring.close()
        _join(self._threads)
        self._arrived.put(None)  # after the readers, whose buffers it gives back
        _join(self._issuers)
        self.timeline.closed()

    def check(self) -> None:
        """Raise what went wrong after the last wait.

        Raises:
            OSError, RuntimeError: A read or a copy failed.
        """
        if self._failure is not None:
            raise self._failure

    def _guarded(self, work: Callable[[], None]) -> None:
        """Hand what goes wrong in a thread to the one that waits."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._fail(error)

    def _read_to_places(self) -> None:
        """Read chunks to where they belong, in memory of the host."""
        lander = CpuLander(self._options.buffer_bytes)
        for batch, chunk in self._work(self._queue):
            with _naming(chunk):
                self.timeline.read_begins()
                lander.land(chunk)
            self.timeline.read_ended(chunk.num_bytes)
            self._done(batch, None)

    def _read_to_ring(self) -> None:  # pragma: no cover - needs CUDA
        """Read chunks into buffers, and hand them to the thread that copies."""
        assert self._ring is not None
        torch.cuda.set_device(self._device)  # of this thread; buffers are made in it
        for batch, chunk in self._work(self._queue):
            with _naming(chunk):
                slot = self._ring.take(chunk.num_bytes)
                try:
                    self.timeline.read_begins()
                    slot.read(chunk)
                except BaseException:
                    self._ring.give_back(slot)
                    raise
            self.timeline.read_ended(chunk.num_bytes)
            self._arrived.put((batch, chunk, slot))

    def _work(self, waiting: queue.SimpleQueue[Work | None]) -> Iterator[Work]:
        """Yield what waits in a queue, until all threads are told to stop."""
        while (work := waiting.get()) is not None and not self._stopping:
            yield work
        waiting.put(None)  # for the next thread

    def _issue_copies(self) -> None:  # pragma: no cover - needs CUDA
        """Bring to its place what was read; gives every buffer back, whatever fails."""
        assert self._ring is not None
        lander: CudaLander | None = None
        while (work := self._arrived.get()) is not None:
            batch, chunk, slot = work
            try:
                if lander is None:
                    lander = CudaLander(self._device, self._options.buffer_bytes)
                if not self._stopping:
                    with _naming(chunk):
                        event = lander.land(chunk, slot, batch.ready)
                    self._done(batch, event)
            except BaseException as error:  # noqa: BLE001 - handed on
                self._fail(error)
            finally:
                self._ring.give_back(slot)
        try:
            if lander is not None:
                lander.finish()
        except RuntimeError as error:
            self._fail(error)

    def _read_asked(self) -> None:
        """Ask sources, in order."""
        with _on_stream(self._device) as stream:
            for batch, item in self._work(self._asked):
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


def _start(work: Callable[[], None], threads: list[threading.Thread]) -> None:
    """Start a thread that is known before it runs, whenever an interrupt comes."""
    name = f"deferred_init loading {len(threads)}"
    thread = threading.Thread(target=work, name=name, daemon=True)
    threads.append(thread)
    thread.start()


def _join(threads: list[threading.Thread]) -> None:
    while threads:
        if threads[-1].ident is not None:  # it is None if starting was interrupted
            threads[-1].join()
        threads.pop()


@contextmanager
def _naming(chunk: Chunk) -> Iterator[None]:
    """Say in an error what was read from where."""
    try:
        yield
    except Exception as error:
        keys = listing([each.key for each in chunk.landings])
        raise OSError(
            f"reading {keys} from {chunk.file.name} failed: {error}"
        ) from error


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

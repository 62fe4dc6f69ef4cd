"""What the machine allows: the rates and fixed costs that bound every loader."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_GB = 1e9
_READ_ONLY = 8
"""`cudaHostRegisterReadOnly`."""
_READ = 4 * 10**9
"""Bytes that are read for one figure."""


def limits(path: Path, device: torch.device) -> Iterator[str]:
    """Measure one after the other, and yield a line for each.

    Args:
        path: A large file that is in the page cache.
        device: The device that is loaded to.
    """
    cores = len(os.sched_getaffinity(0))
    for threads in sorted({1, cores // 2 or 1, cores}):
        for mib in (1, 4, 8):
            rate = _read_rate(path, threads, mib << 20, pinned=device.type == "cuda")
            yield f"read by {threads:2d} threads, {mib} MiB at once: {rate:6.1f} GB/s"
    if device.type == "cuda":
        yield from _cuda_limits(path, device)


def _read_rate(path: Path, num_threads: int, num_bytes: int, *, pinned: bool) -> float:
    """Read a file into one buffer per thread; return GB/s."""
    total = min(_READ, path.stat().st_size) if num_threads > 1 else 10**9
    descriptor = os.open(path, os.O_RDONLY)
    buffers = [_buffer(num_bytes, pinned=pinned) for _ in range(num_threads)]
    for buffer in buffers:
        buffer.fill_(1)

    def read(number: int) -> None:
        view = memoryview(buffers[number].numpy())
        for offset in range(number * num_bytes, total, num_threads * num_bytes):
            os.preadv(descriptor, [view], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return total / seconds / _GB


def _buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _cuda_limits(path: Path, device: torch.device) -> Iterator[str]:
    def free_all() -> None:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def on_gpu(num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    free_all()
    seconds, blocks = _seconds(lambda: [on_gpu(64 << 20) for _ in range(128)])
    yield f"GPU memory, 128 blocks of 64 MiB: {seconds * 1e3:.1f} ms"
    del blocks
    seconds, _ = _seconds(free_all)
    yield f"giving it back: {seconds * 1e3:.1f} ms"
    seconds, block = _seconds(lambda: on_gpu(8 << 30))
    yield f"GPU memory, one block of 8 GiB: {seconds * 1e3:.1f} ms"
    pinned = _buffer(256 << 20, pinned=True)

    def copy() -> None:
        for number in range(16):
            place = block[number << 28 : (number + 1) << 28]
            place.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    rate = 16 * pinned.numel() / _seconds(copy)[0] / _GB
    yield f"copied from pinned memory: {rate:.1f} GB/s"
    for mib in (1, 4, 8):
        seconds, _held = _seconds(
            lambda mib=mib: [_buffer((mib << 20) - 64, pinned=True) for _ in range(16)]
        )
        each = seconds / 16
        yield f"pinning {mib} MiB: {each * 1e3:.2f} ms, {mib / 1024 / each:.1f} GiB/s"
    yield _registering(path, device)


def _registering(path: Path, device: torch.device) -> str:
    """Pin the pages of the file itself, which would make reading needless."""
    num_bytes = 1 << 28
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    address = flat.data_ptr()
    runtime = torch.cuda.cudart()
    seconds, status = _seconds(
        lambda: runtime.cudaHostRegister(address, num_bytes, _READ_ONLY)
    )
    if int(status) != 0:
        return f"pinning pages of the file: refused with status {int(status)}"
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(flat, non_blocking=True)
        torch.cuda.synchronize(device)

    rate = num_bytes / _seconds(copy)[0] / _GB
    back, _ = _seconds(lambda: runtime.cudaHostUnregister(address))
    return (
        f"pinning pages of the file: {num_bytes / seconds / _GB:.1f} GB/s, copied at "
        f"{rate:.1f} GB/s, unpinned at {num_bytes / back / _GB:.1f} GB/s"
    )


def _seconds(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result

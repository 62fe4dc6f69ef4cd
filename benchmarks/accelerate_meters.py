"""What a case of the accelerate table is measured with: host memory, time, bits."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

GPU = torch.cuda.is_available()


class HostPeak:
    """The most memory of this process while the context is open, in bytes."""

    def __enter__(self) -> HostPeak:
        gc.collect()
        self.before = self.peak = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _resident_bytes())

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, _resident_bytes())

    @property
    def growth(self) -> int:
        """Return what was added to the memory at the start."""
        return self.peak - self.before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Clock:
    """Seconds of each stage, with the work on the device that it asked for."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def stage(self, name: str) -> None:
        """End a stage."""
        if GPU:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


@contextmanager
def turn(lock: Path | None, *, shared: bool = False) -> Iterator[None]:
    """Let one process at a time measure, of those that name the same file.

    Those that take a shared turn run side by side, while nobody measures.
    """
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def values_of(model: nn.Module) -> str:
    """Hash names and bits of all parameters, in order; those of this rank."""
    made = hashlib.sha256()
    for name, parameter in model.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        made.update(f"{name.replace('_orig_mod.', '')} {checksum(local)}\n".encode())
    return made.hexdigest()[:16]


def checksum(tensor: torch.Tensor, chunk: int = 2**24) -> int:
    """Add up a tensor's words, each times an odd number that its place gives.

    Integers of 64 bits that wrap: the same on every device, in whatever order they are
    added, and another one where two elements have changed places.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.contiguous().flatten().view(words[tensor.element_size()])
    total = 0
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device)
        total += int((part * (places * _SPREAD | 1)).sum())
    return total % 2**64


# The golden ratio's fraction in 64 bits, made even so that `| 1` is the last bit.
_SPREAD = 0x9E3779B97F4A7C14 - 2**64


def versions() -> dict[str, str]:
    """Return what the numbers depend on."""
    names = ("torch", "transformer-engine", "accelerate", "transformers")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name() if GPU else "CPU"
    return found

"""What a case of the accelerate table is measured with: host memory, time, bits."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

GPU = torch.cuda.is_available()


class HostPeak:
    """The most memory of this process while the context is open, in bytes.

    Another process looks every two milliseconds: a thread of this one would take turns
    with what is measured.
    """

    def __enter__(self) -> HostPeak:
        gc.collect()
        command = [sys.executable, "-S", "-c", _WATCH, str(os.getpid())]
        self._watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._watcher.stdout is not None
        self._before = int(self._watcher.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        last, _ = self._watcher.communicate()
        self._peak = int(last)

    @property
    def growth(self) -> int:
        """Return what was added to the memory at the start."""
        return self._peak - self._before


# Prints what a process holds, and when standard input ends, what it held at most.
_WATCH = """
import os, select, sys
size = os.sysconf("SC_PAGE_SIZE")
def held():
    with open(f"/proc/{sys.argv[1]}/statm") as file:
        return int(file.read().split()[1]) * size
peak = held()
print(peak, flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    peak = max(peak, held())
print(max(peak, held()))
"""


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

"""Seconds, bytes and correctness of one loader."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PAGE = 4096
_HOST = {"RssAnon": "anonymous", "RssShmem": "shared"}

Load = Callable[[], Any]


def measure(
    load: Load, folder: Path, device: torch.device, repeat: int
) -> dict[str, Any]:
    """Run one loader several times in this process.

    The first run is the cold start; it is watched for memory and compared with the
    file. The best of the others is the result.

    Args:
        load: Loads and returns a model or a mapping of tensors.
        folder: Where the checkpoint is.
        device: Where to; its context exists.
        repeat: How often.
    """
    warnings.simplefilter("ignore")
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    result: dict[str, Any] = {"bytes": total}
    seconds, touched = [], []
    for number in range(repeat):
        before = _gpu_in_use(device)
        with _host_peak(watch=number == 0) as grown:
            start = time.perf_counter()
            loaded = load()
            _finish(device)
            seconds.append(time.perf_counter() - start)
        if number == 0:
            result["host_bytes"] = sum(grown.values())
            result["host"] = grown | _pinned_by_torch()
            if device.type == "cuda":
                result["gpu_bytes_over_model"] = _gpu_peak(device) - before - total
            _check(loaded, folder)  # last: it takes memory of its own
        if device.type == "cpu":
            start = time.perf_counter() - seconds[-1]
            _touch(loaded)
            touched.append(time.perf_counter() - start)
        del loaded
        gc.collect()
    best = min(seconds[1:] or seconds)
    result |= {
        "cold_s": seconds[0],
        "best_s": best,
        "seconds": seconds,
        "gigabytes_per_s": total / best / 1e9,
    }
    if touched:
        result["touched_s"] = min(touched[1:] or touched)
    return result


def row(result: dict[str, Any]) -> str:
    """Spell out a result in one line."""
    text = (
        f"{result['name']:<34} {result['best_s']:8.3f} s "
        f"{result['gigabytes_per_s']:8.2f} GB/s  cold {result['cold_s']:7.3f} s  "
        f"host +{result['host_bytes'] / 1e6:.0f} MB"
    )
    if "touched_s" in result:
        text += f"  touched {result['touched_s']:.3f} s"
    if "gpu_bytes_over_model" in result:
        over = result["gpu_bytes_over_model"] / 1e6
        text += f"  GPU +{over:.0f} MB over the model"
    return text


def make_context(device: torch.device) -> None:
    """Make what belongs to the device and to no loader."""
    if device.type == "cuda":
        pinned = torch.ones(1024).pin_memory()
        pinned.to(device, non_blocking=True).add_(1).cpu()
        torch.cuda.synchronize(device)


@contextmanager
def timelines() -> Iterator[list[str]]:
    """Collect what the engine of deferred_init says about its reads."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("deferred_init.loading"), Collect()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_in_use(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _gpu_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _tensors(loaded: Any) -> dict[str, Tensor]:
    return dict(loaded if isinstance(loaded, dict) else loaded.state_dict())


def _touch(loaded: Any) -> None:
    """Read one byte of every page."""
    for tensor in _tensors(loaded).values():
        tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE].sum()


def _check(loaded: Any, folder: Path) -> None:
    """Compare some tensors with the file, bit by bit."""
    from safetensors import safe_open

    state = _tensors(loaded)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
            for key in keys[:: max(1, len(keys) // 4)]:
                expected = file.get_tensor(key)
                found = state[key]
                assert torch.equal(found, expected.to(found.device)), key


@contextmanager
def _host_peak(*, watch: bool) -> Iterator[dict[str, int]]:
    """Sample memory of this process that is no page of a file.

    Args:
        watch: Whether to; sampling takes a little time from what is measured.

    Yields:
        The growth by kind at the moment of the highest sum, filled in at the end.
    """
    grown: dict[str, int] = {}
    if not watch:
        yield grown
        return
    start = _host_bytes()
    done = threading.Event()

    def sample() -> None:
        now = {kind: value - start[kind] for kind, value in _host_bytes().items()}
        if not grown or sum(now.values()) > sum(grown.values()):
            grown.update(now)

    def watching() -> None:
        while not done.wait(0.002):
            sample()

    thread = threading.Thread(target=watching, daemon=True)
    thread.start()
    try:
        yield grown
    finally:
        done.set()
        thread.join()
        sample()


def _pinned_by_torch() -> dict[str, int]:
    """Return the pinned bytes of torch's cache, which the kernel may count or not."""
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    return {"pinned": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)}


def _host_bytes() -> dict[str, int]:
    """Return the process's bytes that are no file's, by kind, as the kernel counts."""
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _HOST:
                found[_HOST[name]] = 1024 * int(value.split()[0])
    return found

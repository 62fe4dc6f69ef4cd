"""`deferred-init bench`: eager construction and ours, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from deferred_init.commands.arguments import positive

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes besides its target."""
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--recipe", help="for materialize only; eager knows none")
    parser.add_argument("--repeats", type=positive, default=5, help="default: 5")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Time a constructor, eagerly and deferred.

    One run of each comes first and does not count. Every run starts with no model and
    ends when the device has finished.

    Returns:
        Medians in seconds, as plain data with `ok`, and in words.

    Raises:
        TargetError: The target cannot be used.
    """
    from deferred_init.api import materialize
    from deferred_init.target import build_deferred, built, load_target

    build, device = load_target(arguments.target), torch.device(arguments.device)

    def eager() -> None:
        with device:
            built(build())

    found: dict[str, list[float]] = {"eager": [], "construct": [], "materialize": []}
    for repeat in range(arguments.repeats + 1):
        kept = repeat > 0
        seconds, _ = _timed(device, eager)
        found["eager"] += [seconds] * kept
        seconds, result = _timed(device, lambda: build_deferred(build))
        found["construct"] += [seconds] * kept
        models, optimizers = built(result)

        def fill(models: Any = models, optimizers: Any = optimizers) -> Any:
            return materialize(
                models,
                device,
                arguments.recipe,
                optimizers=optimizers,
                seed=0,
                progress=False,
            )

        seconds, report = _timed(device, fill)
        found["materialize"] += [seconds] * kept
    medians = {name: median(values) for name, values in found.items()}
    medians["total"] = medians["construct"] + medians["materialize"]
    lines = [
        f"{arguments.target} on {device}, {report.final_bytes:,} bytes, median of "
        f"{arguments.repeats} runs after one that does not count",
        f"eager construction   {medians['eager']:10.4f} s",
        f"deferred_init        {medians['construct']:10.4f} s",
        f"materialize          {medians['materialize']:10.4f} s",
        f"both                 {medians['total']:10.4f} s",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
    ]
    data = {
        "ok": True,
        "target": arguments.target,
        "device": str(device),
        "recipe": report.recipe,
        "final_bytes": report.final_bytes,
        "num_threads": torch.get_num_threads(),
        "versions": dict(report.versions),
        "median_s": medians,
        "seconds": found,
    }
    return data, "\n".join(lines)


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Call, wait for the device, and return the seconds and the result."""
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result

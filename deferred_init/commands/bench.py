"""`deferred-init bench`: eager construction and ours, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch

from deferred_init.commands.arguments import add_target, positive, usable_device

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = "time a constructor, eagerly and deferred, side by side"
EXAMPLE: Final = "deferred-init bench my_project.model:build --device cuda"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target, where it is made, and how often."""
    add_target(parser)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--recipe", help="for materialize only; eager knows none")
    parser.add_argument("--repeats", type=positive, default=5, help="default: 5")


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Time a constructor, eagerly and deferred, and return medians in seconds.

    One run of each comes first and does not count. Every run starts with no model and
    ends when the device has finished.

    Raises:
        TargetError: The target or the device cannot be used.
    """
    from deferred_init.target import load_target

    device = usable_device(arguments.device, must_exist=True)
    build = load_target(arguments.target)
    runs = [
        _one_of_each(build, device, arguments.recipe)
        for _ in range(arguments.repeats + 1)
    ]
    report = runs[-1][1]
    counted = [seconds for seconds, _ in runs[1:]]
    seconds = {name: [each[name] for each in counted] for name in counted[0]}
    medians = {name: median(values) for name, values in seconds.items()}
    medians["total"] = medians["construct"] + medians["materialize"]
    data = {
        "ok": True,
        "target": arguments.target,
        "device": str(device),
        "recipe": report.recipe,
        "final_bytes": report.final_bytes,
        "num_threads": torch.get_num_threads(),
        "versions": dict(report.versions),
        "median_s": medians,
        "seconds": seconds,
    }
    return True, data, _text(data, arguments.repeats)


def _one_of_each(
    build: Callable[[], Any], device: torch.device, recipe: str | None
) -> tuple[dict[str, float], Any]:
    """Construct eagerly and deferred; return the seconds and the report."""
    from deferred_init.api import materialize
    from deferred_init.target import build_deferred, built

    def eager() -> None:
        with device:
            built(build())

    eager_s, _ = _timed(device, eager)
    construct_s, result = _timed(device, lambda: build_deferred(build))
    models, optimizers = built(result)

    def fill() -> Any:
        return materialize(
            models, device, recipe, optimizers=optimizers, seed=0, progress=False
        )

    materialize_s, report = _timed(device, fill)
    seconds = {
        "eager": eager_s,
        "construct": construct_s,
        "materialize": materialize_s,
    }
    return seconds, report


def _text(data: dict[str, Any], repeats: int) -> str:
    medians = data["median_s"]
    return "\n".join(
        (
            f"{data['target']} on {data['device']}, {data['final_bytes']:,} bytes, "
            f"median of {repeats} runs after one that does not count",
            f"eager construction   {medians['eager']:10.4f} s",
            f"deferred_init        {medians['construct']:10.4f} s",
            f"materialize          {medians['materialize']:10.4f} s",
            f"both                 {medians['total']:10.4f} s",
            f"torch {torch.__version__}, {data['num_threads']} threads",
        )
    )


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Call, wait for the device, and return the seconds and the result."""
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result

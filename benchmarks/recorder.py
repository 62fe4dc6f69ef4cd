"""What recording and replaying cost, side by side with torch in one process.

    python benchmarks/recorder.py            # all; about a minute on one core
    python benchmarks/recorder.py --json out.json

Each line is the best of several rounds in which the two contenders take turns, one
thread, and the ratio. Host memory is what the process's peak grew by.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.llama import llama_config
from benchmarks.scale_models import SIZES, Size
from deferred_init.record import (
    deferred_init,
    materialize_module,
    recording_of,
)

SMALL = Size(layers=8, hidden=1024, inner=2816, heads=16, kv_heads=4, vocabulary=32000)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison: seconds of both sides, best of the rounds, and their ratio."""

    what: str
    ours_s: float
    theirs_s: float
    limit: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times as long as the other side ours takes."""
        return self.ours_s / self.theirs_s


def best_of(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Let the sides take turns and return the best time of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            gc.collect()
            _return_memory()
            gc.disable()
            times[name].append(side())
            gc.enable()
    return {name: min(found) for name, found in times.items()}


def _return_memory() -> None:
    """Give freed memory back, so that no side finds pages that the other touched."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that runs `work` and says how long it took."""

    def run() -> float:
        start = time.perf_counter()
        kept = work()
        seconds = time.perf_counter() - start
        del kept
        return seconds

    return run


def on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds under `torch.device("meta")`."""

    def run() -> nn.Module:
        with torch.device("meta"):
            return build()

    return run


def recording(what: str, build: Callable[[], nn.Module], rounds: int) -> Line:
    """Compare recording with construction on meta."""
    on_meta(build)()
    deferred_init(build)
    seconds = best_of(
        {
            "ours": timed(lambda: deferred_init(build)),
            "theirs": timed(on_meta(build)),
        },
        rounds,
    )
    return Line(
        what=f"record / meta: {what}",
        ours_s=seconds["ours"],
        theirs_s=seconds["theirs"],
        limit=2.0,
    )


def replaying(what: str, build: Callable[[], nn.Module], rounds: int) -> Line:
    """Compare replaying with eager construction."""

    def replay() -> float:
        model = deferred_init(build)
        start = time.perf_counter()
        materialize_module(model)
        return time.perf_counter() - start

    seconds = best_of({"ours": replay, "theirs": timed(build)}, rounds)
    return Line(
        what=f"replay / eager: {what}",
        ours_s=seconds["ours"],
        theirs_s=seconds["theirs"],
        limit=1.1,
    )


def toy(num_layers: int, width: int = 8) -> Callable[[], nn.Module]:
    """Return a function that builds a stack of linear layers."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    return build


def growth() -> Line:
    """Compare a layer of 10,000 with a layer of 1,000: linear means 1."""
    small, large = toy(1_000), toy(10_000)
    seconds = best_of(
        {
            "ours": timed(lambda: deferred_init(large)),
            "theirs": timed(lambda: deferred_init(small)),
        },
        3,
    )
    return Line(
        what="a layer of 10,000 / a layer of 1,000",
        ours_s=seconds["ours"] / 10_000,
        theirs_s=seconds["theirs"] / 1_000,
        limit=1.5,
    )


def llama(size: Size) -> Callable[[], nn.Module]:
    """Return a function that builds a Llama from Hugging Face."""
    from transformers import LlamaForCausalLM

    other = {"max_position_embeddings": 131072, "dtype": "bfloat16"}
    config = llama_config(size, **other)
    return lambda: LlamaForCausalLM(config)


def largest() -> tuple[Line, float]:
    """Record Llama-3.1-405B's real shape; also return the host memory in MB."""
    build = llama(SIZES["405b"])
    on_meta(build)()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = deferred_init(build)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    recorded = recording_of(model)
    assert recorded is not None
    num = sum(p.numel() for p in model.parameters())
    line = recording("Llama-3.1-405B, transformers", build, 3)
    note = f"{num / 1e9:.1f} B parameters, {len(recorded.nodes)} nodes"
    return Line(**{**asdict(line), "note": f"{note}, {grown:.0f} MB of host memory"}), (
        grown
    )


def main() -> int:
    """Run all comparisons, print them, and fail if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the lines here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformer = lambda: nn.Transformer(  # noqa: E731
        512, 8, 6, 6, 2048, batch_first=True
    )
    lines = [
        recording("1,000 linear layers", toy(1_000), 5),
        recording("nn.Transformer(512, 8, 6, 6)", transformer, 5),
        growth(),
        replaying("48 layers of 1024 x 1024", toy(48, 1024), 5),
        replaying("nn.Transformer(512, 8, 6, 6)", transformer, 5),
    ]
    memory_mb = 0.0
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("transformers is not installed: no Llama lines")
    else:
        line, memory_mb = largest()
        small = llama(SMALL)
        lines += [line, recording("a small Llama", small, 5)]
        lines.append(replaying("a small Llama", small, 5))
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}")
    for line in lines:
        verdict = "" if line.ratio <= line.limit else f"  ABOVE {line.limit}"
        print(
            f"{line.what:44} {line.ours_s * 1e3:10.3f} ms"
            f" {line.theirs_s * 1e3:10.3f} ms {line.ratio:6.2f} x{verdict}  {line.note}"
        )
    if args.json:
        held = [{**asdict(line), "ratio": line.ratio} for line in lines]
        args.json.write_text(json.dumps(held, indent=1) + "\n")
    return int(memory_mb > 500 or any(line.ratio > line.limit for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())

"""What `materialize` costs besides the kernels: Python, per stage and per tensor.

    python benchmarks/overhead.py                                  # CPU, tiny widths
    python benchmarks/overhead.py --shape 3.5b 8b --device cuda --json FILE
    python benchmarks/overhead.py --case plain hf --repeats 9

Models of a Llama's shape are built without memory in several ways and materialized:

* plain: classes of torch.nn, on meta; `recorded`: the same inside `deferred_init`;
* hf, hf-recorded: `LlamaForCausalLM` of transformers, where that is installed;
* sharded, sharded-recorded: `fully_shard` over a fake process group, W = 8, rank 4;
* te, te-ops: Transformer Engine's `TransformerLayer` and `te.ops`, where it is
  installed; te-fp8, te-ops-fp8: with FP8 weights, on a GPU.

With tiny widths the kernels take next to nothing, so that all of the time is overhead,
on a CPU as well as on a GPU. Each case has two rows: its first call, which loads
modules and kernels (most of them for the first case in the process: name one alone for
what users wait), and the medians of the calls after it. On a GPU a third row has the
sum of the time of all kernels of one more run, by torch's profiler, and `normal_` for
the full model. Seconds are of the clock on a GPU, and of the process on a CPU, so
that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import scale  # noqa: E402
from overhead_models import CASES, SHAPES, Build, possible  # noqa: E402
from scale_models import Size  # noqa: E402

import deferred_init as di  # noqa: E402
from deferred_init import api  # noqa: E402

STAGES = {
    "look": "inventory",
    "make_agreed_plan": "plan",
    "take_snapshot": "snapshot",
    "run_plan": "execute",
    "run_audit": "audit",
    "summarize": "report",
}


def measure(
    case: str, size: Size, device: torch.device, repeats: int
) -> Iterator[dict[str, Any]]:
    """Materialize one kind of model several times; yield row by row, in seconds."""
    build, recipe = CASES[case]
    yield {"case": case, "run": "first", **_once(build, size, device, recipe)}
    runs = [_once(build, size, device, recipe) for _ in range(repeats)]
    if not runs:
        return
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    yield {"case": case, "run": "median", **medians}
    if device.type == "cuda":
        shapes = [p.size() for p in build(size, device).parameters()]
        floor = scale.floor(shapes, device)
        kernels = _kernel_seconds(build, size, device, recipe)
        yield {
            "case": case,
            "run": "kernels",
            "kernels_s": kernels,
            "normal_s": floor,
            "ratio": medians["total_s"] / kernels,
        }


def _once(
    build: Build, size: Size, device: torch.device, recipe: str | None
) -> dict[str, float]:
    model = build(size, device)
    gc.collect()
    scale._synchronize(device)
    clock = _clock(device)
    with _stages(clock) as seconds:
        start = clock()
        report = di.materialize(model, device, recipe, seed=0, progress=False)
        returned = clock()
        scale._synchronize(device)
        done = clock()
    assert report.ok
    tensors = list(model.parameters()) + list(model.buffers())
    return {
        "total_s": done - start,
        "returned_s": returned - start,
        **seconds,
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors),
    }


@contextmanager
def _stages(clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Time the stages of `materialize` by the functions that its body names."""
    seconds = dict.fromkeys(STAGES.values(), 0.0)
    originals = {name: getattr(api, name) for name in STAGES}

    def timed(function: Any, stage: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[stage] += clock() - start

        return call

    for name, original in originals.items():
        setattr(api, name, timed(original, STAGES[name]))
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(api, name, original)
        seconds["execute"] -= seconds["audit"]  # which is a part of it


def _clock(device: torch.device) -> Callable[[], float]:
    return time.process_time if device.type == "cpu" else time.perf_counter


def _kernel_seconds(
    build: Build, size: Size, device: torch.device, recipe: str | None
) -> float:
    """Sum of the time of all kernels and copies of one run, on the device."""
    model = build(size, device)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        di.materialize(model, device, recipe, seed=0, progress=False)
        scale._synchronize(device)
    on_device = torch.autograd.DeviceType.CUDA
    spans = [e.time_range for e in profile.events() if e.device_type == on_device]
    return sum(span.end - span.start for span in spans) / 1e6


COLUMNS = ("tensors", "ms", "us/tensor", *STAGES.values())


def _head(shape: str) -> str:
    columns = "".join(f"{column:>10}" for column in COLUMNS)
    return f"{shape}: stages in microseconds per tensor\n{'':<26}{columns}"


def _line(row: dict[str, Any]) -> str:
    label = f"{row['case']:<17}{row['run']:<9}"
    if row["run"] == "kernels":
        milliseconds = row["kernels_s"] * 1e3, row["normal_s"] * 1e3
        return label + (
            "{:.1f} ms, `normal_` {:.1f} ms".format(*milliseconds)
            + f"; the median is {row['ratio']:.2f} times the kernels"
        )
    each, total = 1e6 / row["tensors"], row["total_s"]
    numbers = [total * 1e3, total * each, *(row[s] * each for s in STAGES.values())]
    cells = [f"{row['tensors']:.0f}", *(f"{number:.1f}" for number in numbers)]
    return label + "".join(f"{cell:>10}" for cell in cells)


def main() -> None:
    """Measure what the command line asks for; print and write row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "repeats": options.repeats,
        "shapes": {},
    }
    for shape in options.shape:
        print(_head(shape), flush=True)
        rows = found["shapes"][shape] = []
        for case in (case for case in options.case if possible(case, device)):
            for row in measure(case, SHAPES[shape], device, options.repeats):
                rows.append(row)
                print(_line(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=2) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""How fast `rng="fast"` writes, beside torch, and what a model takes.

    python benchmarks/fast_init.py                            # on a CUDA device
    python benchmarks/fast_init.py --tune --json out.json     # other cuts of the kernel
    python benchmarks/fast_init.py --model te-32 --recipe fp8_current
    python benchmarks/fast_init.py --device cpu --megabytes 8 --no-model

All ways of a size take turns in one process, after one round that does not count; then
medians. Terabytes of the tensor per second. A launch is timed on the device, between
events, with the device kept busy before, so that the time of Python does not count.
The GPU time of a model is the sum over all kernels and copies of `materialize`, as
torch's profiler has it; the host's time is measured without the profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deferred_init as di
from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.fill import fill
from deferred_init.fast.philox import ROUNDS
from deferred_init.fast.window import Window

Way = Callable[[Tensor], Any]
KEY = (1, 2, 3, 4)
NORMAL, UNIFORM = Normal(0.0, 0.02), Uniform(-0.1, 0.1)
TRUNCATED = TruncatedNormal(0.0, 0.02, -0.04, 0.04)
CUTS = [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)]


def ways(tune: bool) -> Iterator[tuple[str, Way]]:
    """Yield what writes a tensor."""
    yield "torch fill_", lambda out: out.fill_(0.5)
    yield "torch normal_", lambda out: out.normal_(0.0, 0.02)
    yield "torch uniform_", lambda out: out.uniform_(-0.1, 0.1)
    for name, distribution in (
        ("normal", NORMAL),
        ("uniform", UNIFORM),
        ("truncated normal", TRUNCATED),
    ):
        yield f"fast {name}", partial(fill, distribution=distribution, key=KEY)
    if not tune:
        return
    cuts = [("normal", NORMAL, *cut, 7) for cut in CUTS]
    cuts += [("normal", NORMAL, *cut, 10) for cut in CUTS[1::3]]
    cuts += [("uniform", UNIFORM, *cut, 7) for cut in CUTS[::4]]
    cuts += [("truncated", TRUNCATED, *cut, 7) for cut in CUTS[::4]]
    for name, distribution, block, warps, rounds in cuts:
        label = f"{name}, {rounds} rounds, {block} x {warps}"
        yield label, _cut(distribution, block, warps, rounds)


def _cut(distribution: Distribution, block: int, warps: int, rounds: int) -> Way:
    from deferred_init.fast.triton_fill import Tuning, fill_with_triton

    tuning = Tuning(block=block, num_warps=warps, rounds=rounds)

    def write(out: Tensor) -> None:
        window = Window.of_whole(out.numel())
        fill_with_triton(out, window, distribution, KEY, tuning)

    return write


def seconds_of(way: Way, out: Tensor) -> float:
    """Time one launch on the tensor's device."""
    if out.device.type != "cuda":
        started = time.perf_counter()
        way(out)
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond
    before.record()
    way(out)
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print terabytes per second, by way and size."""
    sizes = arguments.megabytes
    print(f"{'TB/s, ' + arguments.dtype:36}", *(f"{size:>7} MB" for size in sizes))
    outs = [
        torch.empty(
            size * 10**6 // torch.finfo(getattr(torch, arguments.dtype)).bits * 8,
            dtype=getattr(torch, arguments.dtype),
            device=arguments.device,
        )
        for size in sizes
    ]
    chosen = list(ways(arguments.tune))
    found: dict[str, list[list[float]]] = {n: [[] for _ in outs] for n, _ in chosen}
    for repeat in range(arguments.repeats + 1):
        for name, way in chosen:
            for place, out in enumerate(outs):
                took = seconds_of(way, out)
                if repeat:
                    found[name][place].append(took)
    speeds = {}
    for name, columns in found.items():
        speeds[name] = [
            out.numel() * out.element_size() / median(taken) / 1e12
            for taken, out in zip(columns, outs, strict=True)
        ]
        print(f"{name:36}", *(f"{speed:10.4f}" for speed in speeds[name]), flush=True)
    return {"megabytes": sizes, "tb_per_s": speeds}


def model_times(name: str, recipe: str, repeats: int) -> dict[str, Any]:
    """Print what `materialize` takes, on the host and on the GPU."""
    from construct_models import SHAPES, hugging_face, transformer_engine

    shape = SHAPES[name]

    def build() -> nn.Module:
        if shape.library == "te":
            with di.on_meta():
                return transformer_engine(shape, "meta")
        with torch.device("meta"):
            return hugging_face(shape)()

    found: dict[str, Any] = {}
    print(f"\n{name}, {recipe}: {'':20} {'host ms':>9} {'GPU ms':>9} {'kernels':>8}")
    for rng in ("eager", "fast"):
        hosts = []
        for repeat in range(repeats + 1):
            model = build()
            torch.cuda.synchronize()
            started = time.perf_counter()
            _materialize(model, rng, recipe)
            torch.cuda.synchronize()
            if repeat:
                hosts.append(time.perf_counter() - started)
            del model
        spent = [_on_gpu(build(), rng, recipe) for _ in range(repeats)]
        gpu, kernels = median(gpu for gpu, _ in spent), spent[0][1]
        label = f"materialize, rng={rng}"
        print(
            f"{label:36} {median(hosts) * 1e3:9.1f} {gpu * 1e3:9.2f} {kernels:8}",
            flush=True,
        )
        found[rng] = {"host_s": hosts, "gpu_s": [gpu for gpu, _ in spent]}
    return {"model": name, "recipe": recipe, "times": found}


def _materialize(model: nn.Module, rng: str, recipe: str) -> None:
    preset = None if recipe == "bf16" else recipe
    di.materialize(model, "cuda", preset, seed=0, rng=rng, progress=False)


def _on_gpu(model: nn.Module, rng: str, recipe: str) -> tuple[float, int]:
    """Return the seconds of all kernels of one run, and their number."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        _materialize(model, rng, recipe)
        torch.cuda.synchronize()
    events = [e for e in trace.events() or () if e.device_type.name == "CUDA"]
    return sum(e.self_device_time_total for e in events) / 1e6, len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[100, 500, 2000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--model", default="te-32")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    where = arguments.device
    if where == "cuda":
        where = torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, {ROUNDS} rounds of Philox")
    found = {"device": where, "torch": torch.__version__, "fills": table(arguments)}
    if not arguments.no_model:
        found["model"] = model_times(arguments.model, arguments.recipe, 5)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What `materialize` costs besides the kernels: Python, per stage and per tensor.

    python benchmarks/overhead.py                                  # CPU, tiny widths
    python benchmarks/overhead.py --shape 3.5b 8b --device cuda --json FILE
    python benchmarks/overhead.py --case plain hf --repeats 9

Models of a Llama's shape are built without memory in several ways and materialized:

* plain: classes of torch.nn, on meta; `recorded`: the same inside `deferred_init`;
* hf, hf-recorded: `LlamaForCausalLM` of transformers, where that is installed;
* sharded, sharded-recorded: `fully_shard` over a fake process group, W = 8, rank 4;
* te, te-fp8: Transformer Engine's `TransformerLayer`, where it runs (a GPU).

With tiny widths the kernels take next to nothing, so that all of the time is overhead,
on a CPU as well as on a GPU. On a GPU with real widths, the sum of the time of all
kernels is measured in one more run, by torch's profiler; and `normal_` for the full
model. All times are medians, after a first run that is listed by itself: it loads
modules and kernels. Seconds are of the clock on a GPU, and of the process on a CPU, so
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import scale  # noqa: E402

import deferred_init as di  # noqa: E402
from deferred_init import api  # noqa: E402

WORLD, RANK = 8, 4
STAGES = {
    "look": "inventory",
    "make_agreed_plan": "plan",
    "take_snapshot": "snapshot",
    "run_plan": "execute",
    "run_audit": "audit",
    "summarize": "report",
}
SHAPES = {
    "tiny": scale.Size(
        layers=32, hidden=16, inner=24, heads=4, kv_heads=2, vocabulary=32
    ),
    "3.5b": scale.Size(
        layers=16, hidden=4096, inner=14336, heads=32, kv_heads=8, vocabulary=1024
    ),
    "8b": scale.SIZES["8b"],
}

Build = Callable[[scale.Size, torch.device], nn.Module]


def plain(size: scale.Size, device: torch.device) -> nn.Module:
    return scale.build(size, "meta")


def recorded(size: scale.Size, device: torch.device) -> nn.Module:
    return _recorded(scale.Decoder, size, device=device)


def hf(size: scale.Size, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        return _llama(size)


def hf_recorded(size: scale.Size, device: torch.device) -> nn.Module:
    return _recorded(_llama, size, device=device)


def sharded(size: scale.Size, device: torch.device) -> nn.Module:
    return _shard(plain(size, device), device)


def sharded_recorded(size: scale.Size, device: torch.device) -> nn.Module:
    return _shard(recorded(size, device), device)


def te(size: scale.Size, device: torch.device) -> nn.Module:
    from transformer_engine.pytorch import TransformerLayer

    layers = [
        TransformerLayer(
            size.hidden,
            size.inner,
            size.heads,
            num_gqa_groups=size.kv_heads,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device="meta",
        )
        for _ in range(size.layers)
    ]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Build, str | None]] = {
    "plain": (plain, None),
    "recorded": (recorded, None),
    "hf": (hf, None),
    "hf-recorded": (hf_recorded, None),
    "sharded": (sharded, None),
    "sharded-recorded": (sharded_recorded, None),
    "te": (te, None),
    "te-fp8": (te, "fp8_current"),
}


def possible(case: str, device: torch.device) -> bool:
    """Whether what a case needs is here."""
    if case.startswith("hf"):
        return find_spec("transformers") is not None
    if case.startswith("te"):
        return find_spec("transformer_engine") is not None and device.type == "cuda"
    return True


def measure(
    case: str, size: scale.Size, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Materialize one kind of model several times; medians in seconds."""
    build, recipe = CASES[case]
    first, *runs = [_once(build, size, device, recipe) for _ in range(repeats + 1)]
    medians = {name: statistics.median(run[name] for run in runs) for name in first}
    result: dict[str, Any] = {"case": case, "first_s": first["total_s"], **medians}
    if device.type == "cuda":
        result["kernels_s"] = _kernel_seconds(build, size, device, recipe)
        shapes = [p.size() for p in build(size, device).parameters()]
        result["normal_s"] = scale.floor(shapes, device)
    return result


def _once(
    build: Build, size: scale.Size, device: torch.device, recipe: str | None
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
    build: Build, size: scale.Size, device: torch.device, recipe: str | None
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


def _recorded(make: Any, size: scale.Size, *, device: torch.device) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return di.deferred_init(make, size)
    finally:
        torch.set_default_dtype(default)


def _llama(size: scale.Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        dtype="bfloat16",
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def _shard(model: nn.Module, device: torch.device) -> nn.Module:
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    mesh = init_device_mesh(device.type, (WORLD,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


COLUMNS = (
    "tensors",
    "ms",
    "us/tensor",
    "first ms",
    *STAGES.values(),
    "kernels",
    "normal_",
    "ratio",
)


def _head(shape: str) -> str:
    columns = "".join(f"{column:>10}" for column in COLUMNS)
    return (
        f"{shape}: stages in microseconds per tensor, kernels in ms\n{'':<17}{columns}"
    )


def _line(result: dict[str, Any]) -> str:
    each, total = 1e6 / result["tensors"], result["total_s"]
    numbers = [total * 1e3, total * each, result["first_s"] * 1e3]
    numbers += [result[stage] * each for stage in STAGES.values()]
    kernels = result.get("kernels_s")
    if kernels:
        numbers += [kernels * 1e3, result["normal_s"] * 1e3]
    cells = [f"{result['tensors']:.0f}", *(f"{number:.1f}" for number in numbers)]
    if kernels:
        cells.append(f"{total / kernels:.2f}")
    return f"{result['case']:<17}" + "".join(f"{cell:>10}" for cell in cells)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    cases = [case for case in options.case if possible(case, device)]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "repeats": options.repeats,
        "shapes": {},
    }
    for shape in options.shape:
        print(_head(shape), flush=True)
        results = found["shapes"][shape] = []
        for case in cases:
            results.append(measure(case, SHAPES[shape], device, options.repeats))
            print(_line(results[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

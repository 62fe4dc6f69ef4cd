"""One rank of a large job: seconds, bytes and peak of materializing its shards.

A fake process group stands for the other ranks, so that one device measures what each
of thousands would do. Nothing is communicated, by materialization either.

    python benchmarks/scale.py --device cuda                  # everything
    python benchmarks/scale.py --device cuda --model 405b --world 1024 --rank 7
    python benchmarks/scale.py --device cpu --model tiny --json out.json

Each line is measured in a process of its own. `normal_` is the time that this one
kernel takes to draw all parameters of the full model into one buffer: the floor for
whoever draws them at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deferred_init as di
from benchmarks.scale_models import SIZES, STD, build

WORLDS = (8, 64, 1024, 8192)


def measure(
    model_name: str, world: int, rank: int, device: torch.device, built: str
) -> dict[str, Any]:
    """Materialize one rank's shards; return what it took."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    started = time.perf_counter()
    model = build(SIZES[model_name], built)
    constructed = time.perf_counter()
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = time.perf_counter()
    parameters: list[Any] = list(model.parameters())
    largest = max(p.numel() * p.element_size() for p in parameters)
    _warm_up(device)
    before = _memory(device)
    start = time.perf_counter()
    report = di.materialize(model, device, seed=0, progress=False)
    _synchronize(device)
    seconds = time.perf_counter() - start
    shards = sum(p._local_tensor.nbytes for p in parameters)
    peak = _memory(device) - before
    result: dict[str, Any] = {
        "model": model_name,
        "built": built,
        "world": world,
        "rank": rank,
        "parameters": sum(p.numel() for p in parameters),
        "construct_s": round(constructed - started, 3),
        "shard_s": round(sharded - constructed, 3),
        "materialize_s": round(seconds, 3),
        **{f"{name}_s": round(value, 3) for name, value in report.seconds.items()},
        "shard_bytes": shards,
        "largest_bytes": largest,
        "peak_bytes": peak,
        "predicted_peak_bytes": report.predicted_peak_bytes,
    }
    shapes = [p.size() for p in parameters]
    del model, parameters, report
    gc.collect()
    result["normal_s"] = round(floor(shapes, device), 3)
    result["size"] = asdict(SIZES[model_name])
    return result


def floor(shapes: list[torch.Size], device: torch.device) -> float:
    """Seconds that `normal_` alone takes for tensors of these shapes."""
    largest = max(shape.numel() for shape in shapes)
    buffer = torch.empty(largest, dtype=torch.bfloat16, device=device)
    buffer[: 1 << 20].normal_()
    _synchronize(device)
    start = time.perf_counter()
    for shape in shapes:
        buffer[: shape.numel()].normal_(std=STD)
    _synchronize(device)
    return time.perf_counter() - start


def _warm_up(device: torch.device) -> None:
    """Load the kernels, so that the first one measured does not."""
    layer = nn.Linear(8, 8, device="meta", dtype=torch.bfloat16)
    di.materialize(layer, device, seed=0, progress=False)
    scratch: Tensor = torch.empty(8, 8, dtype=torch.bfloat16, device=device)
    scratch.normal_().clone().copy_(scratch)
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> int:
    """Return the peak so far, of the device or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _line(result: dict[str, Any]) -> str:
    gib = 2**30
    allowed = result["shard_bytes"] + 1.1 * result["largest_bytes"]
    return (
        f"{result['model']:>7} {result['built']:>8} {result['world']:>6} "
        f"{result['rank']:>6} {result['parameters'] / 1e9:>8.2f} "
        f"{result['construct_s']:>8.2f} {result['materialize_s']:>8.2f} "
        f"{result['normal_s']:>8.2f} {result['shard_bytes'] / gib:>9.3f} "
        f"{result['peak_bytes'] / gib:>9.3f} {allowed / gib:>9.3f}"
    )


HEAD = (
    f"{'model':>7} {'built':>8} {'world':>6} {'rank':>6} {'1e9':>8} {'build s':>8} "
    f"{'mat. s':>8} {'normal_':>8} {'shard':>9} {'peak':>9} {'allowed':>9}  GiB"
)


def main() -> None:
    """Measure what the command line asks for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=SIZES, action="append")
    parser.add_argument("--world", type=int, action="append")
    parser.add_argument("--rank", type=int, help="by default one in the middle")
    parser.add_argument("--built", choices=("meta", "recorded"), action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.model or [name for name in SIZES if name != "tiny"]
    worlds, ways = options.world or WORLDS, options.built or ["meta"]
    if options.here:
        device = torch.device(options.device)
        rank = worlds[0] // 2 if options.rank is None else options.rank
        print(json.dumps(measure(models[0], worlds[0], rank, device, ways[0])))
        return
    print(HEAD)
    results: list[dict[str, Any]] = []
    for model in models:
        for built in ways:
            for world in worlds:
                results.append(_in_process(options, model, world, built))
                print(_line(results[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")


def _in_process(
    options: argparse.Namespace, model: str, world: int, built: str
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--here", "--device", options.device]
    command += ["--model", model, "--world", str(world), "--built", built]
    if options.rank is not None:
        command += ["--rank", str(options.rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()

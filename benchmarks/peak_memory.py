"""The most memory that a way to a model takes, on the device and on the host.

    python benchmarks/peak_memory.py --device cuda
    python benchmarks/peak_memory.py --device cpu --model tiny --json out.json

Each way runs once, in a process of its own, after a small model of the same library has
gone the same way, so that what is imported and loaded does not count. Device: the peak
of torch's allocator above what it held before. Host: what the process's peak resident
memory grew by; on a CPU the model itself is in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from construct_models import RECIPES, SHAPES
from construct_ways import ways_of

HEAD = (
    f"{'model':9} {'recipe':12} {'way':54} {'model GB':>9} {'device GB':>10} "
    f"{'host GB':>8}"
)
MODELS = ("gpt2", "llama-1b", "llama-8b", "te-16", "te-32")
_SMALL = {"layers": 1, "hidden": 64, "inner": 64, "heads": 4, "kv_heads": 4}


def measure(model: str, recipe: str, number: int, device: str) -> dict[str, Any]:
    """Go one way, and return the bytes that it took."""
    shape = SHAPES[model]
    small = replace(shape, **_SMALL, vocabulary=min(shape.vocabulary, 64))
    warm = ways_of(small, recipe, device)[number]
    warm.fill(warm.build())
    way = ways_of(shape, recipe, device)[number]
    Path("/proc/self/clear_refs").write_text("5")  # begin to count anew
    before, host = _device_bytes(device), _host_bytes()
    made = way.fill(way.build())
    tensors = {id(t): t for t in (*made.parameters(), *made.buffers())}
    return {
        "model": model,
        "recipe": recipe,
        "way": way.name,
        "model_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "device_bytes": _device_bytes(device) - before,
        "host_bytes": _host_bytes() - host,
    }


def _device_bytes(device: str) -> int:
    """Return the peak so far; nothing on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _host_bytes() -> int:
    """Return the peak resident memory so far, of this program alone."""
    # Not `ru_maxrss`, which remembers the process from before it started Python.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _line(result: dict[str, Any]) -> str:
    sizes = (result[f"{name}_bytes"] / 1e9 for name in ("model", "device", "host"))
    model, on_device, on_host = sizes
    return (
        f"{result['model']:9} {result['recipe']:12} {result['way']:54} {model:9.3f} "
        f"{on_device:10.3f} {on_host:8.3f}"
    )


def _in_process(model: str, recipe: str, number: int, device: str) -> dict[str, Any]:
    """Measure one way in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--here", str(number)]
    command += ["--model", model, "--recipe", recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", nargs="+", default=MODELS, choices=SHAPES)
    parser.add_argument("--recipe", nargs="+", default=["bf16"], choices=RECIPES)
    parser.add_argument("--slow", action="store_true", help="also what draws on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    if options.here is not None:
        model, recipe = options.model[0], options.recipe[0]
        print(json.dumps(measure(model, recipe, options.here, device)))
        return
    print(HEAD, flush=True)
    results: list[dict[str, Any]] = []
    for model in options.model:
        for recipe in options.recipe:
            ways = ways_of(SHAPES[model], recipe, device)
            for number, way in enumerate(ways):
                if way.slow and device == "cuda" and not options.slow:
                    continue
                results.append(_in_process(model, recipe, number, device))
                print(_line(results[-1]), flush=True)
                if options.json:
                    text = json.dumps(results, indent=1) + "\n"
                    options.json.write_text(text)


if __name__ == "__main__":
    main()

"""From nothing to a model with values: every way that a user has, side by side.

    python benchmarks/construct.py --device cuda                     # all models
    python benchmarks/construct.py --device cuda --model te-32 --recipe fp8_current
    python benchmarks/construct.py --device cpu --model tiny --json out.json

All ways of a model run in one process, taking turns; one round comes first and does
not count; then medians. Seconds until the device has finished, for construction and
for filling; the peak of the device's memory over what stays. Each run starts without a
model; `--allocator cold` also gives the device's memory back before each run, as in a
new process. `equal` counts the tensors that equal eager construction's bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from construct_models import RECIPES, SHAPES
from construct_ways import Way, ways_of

HEAD = (
    f"{'model':9} {'recipe':12} {'way':54} {'build ms':>9} {'fill ms':>9} "
    f"{'both ms':>9} {'/ eager':>8} {'GB':>7} {'peak GB':>8} {'equal':>9}"
)
MODELS = ("gpt2", "llama-1b", "llama-8b", "te-16", "te-32")


@dataclass(kw_only=True)
class Line:
    """What one way took; lists have one entry a run."""

    model: str
    recipe: str
    way: str
    construct_s: list[float] = field(default_factory=list)
    fill_s: list[float] = field(default_factory=list)
    final_bytes: int = 0
    peak_bytes: int = 0
    equal: str = ""
    note: str = ""

    @property
    def total_s(self) -> float:
        """Median of construction and filling together."""
        return median(map(sum, zip(self.construct_s, self.fill_s, strict=True)))


def measure(way: Way, line: Line, device: str, *, cold: bool, counts: bool) -> None:
    """Run a way once."""
    _free(device, cold)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    torch.manual_seed(0)
    started = time.perf_counter()
    model = way.build()
    _wait(device)
    built = time.perf_counter()
    model = way.fill(model)
    _wait(device)
    ended = time.perf_counter()
    if counts:
        line.construct_s.append(built - started)
        line.fill_s.append(ended - built)
    if device == "cuda":
        line.final_bytes = torch.cuda.memory_allocated() - before
        line.peak_bytes = torch.cuda.max_memory_allocated() - before


def compare(ways: list[Way], lines: list[Line]) -> None:
    """Count what equals eager construction."""
    torch.manual_seed(0)
    expected = dict(_tensors(ways[0].fill(ways[0].build())))
    for way, line in zip(ways[1:], lines[1:], strict=True):
        if line.note:
            continue
        torch.manual_seed(0)
        model = way.fill(way.build())
        same = sum(
            name in expected and torch.equal(tensor, expected[name])
            for name, tensor in _tensors(model)
        )
        line.equal = f"{same}/{len(expected)}"
        del model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors: dict[str, Any] = {**dict(model.named_parameters())}
    tensors.update(model.named_buffers())
    for name, tensor in tensors.items():
        kept = tensor.detach()
        yield name, kept.dequantize() if hasattr(kept, "_quantizer") else kept


def _free(device: str, cold: bool) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        if cold:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(model: str, recipe: str, arguments: argparse.Namespace) -> list[Line]:
    """Let all ways of a model take turns."""
    ways = ways_of(SHAPES[model], recipe, arguments.device)
    lines = [Line(model=model, recipe=recipe, way=way.name) for way in ways]
    cold = arguments.allocator == "cold"
    for round_ in range(arguments.repeats + 1):
        if round_ == 1:  # what was imported need not be looked at again each time
            gc.collect()
            gc.freeze()
        for way, line in zip(ways, lines, strict=True):
            if way.slow and arguments.device == "cuda" and not arguments.slow:
                line.note = "not run: draws on the CPU; --slow runs it once"
            elif way.slow and arguments.device == "cuda":
                if round_ == 1:
                    line.note = "one run"
                    measure(way, line, arguments.device, cold=cold, counts=True)
            else:
                counts = round_ > 0
                measure(way, line, arguments.device, cold=cold, counts=counts)
    if lines:
        compare(ways, lines)
    _free(arguments.device, cold=True)
    return lines


def table(lines: list[Line]) -> str:
    """Put lines under each other; times as multiples of eager construction's."""
    rows = []
    eager = 0.0
    for line in lines:
        start = f"{line.model:9} {line.recipe:12} {line.way:54}"
        if not line.fill_s:
            rows.append(f"{start} {line.note}")
            continue
        if line.way.startswith("eager on") and ".to(" not in line.way:
            eager = line.total_s
        rows.append(
            f"{start} {median(line.construct_s) * 1e3:9.1f} "
            f"{median(line.fill_s) * 1e3:9.1f} {line.total_s * 1e3:9.1f} "
            f"{line.total_s / eager:8.2f} {line.final_bytes / 1e9:7.2f} "
            f"{line.peak_bytes / 1e9:8.2f} {line.equal:>9} {line.note}"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", nargs="*", default=MODELS, choices=SHAPES)
    parser.add_argument("--recipe", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--allocator", default="warm", choices=("warm", "cold"))
    parser.add_argument("--slow", action="store_true", help="also what draws on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if arguments.device == "cuda":
        versions["card"] = torch.cuda.get_device_name()
    print(versions, f"median of {arguments.repeats}, allocator {arguments.allocator}")
    print(HEAD, flush=True)
    lines: list[Line] = []
    for model in arguments.model:
        for recipe in arguments.recipe:
            found = run(model, recipe, arguments)
            lines += found
            if found:
                print(table(found), flush=True)
    if arguments.json:
        data = {"versions": versions, "lines": [asdict(line) for line in lines]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

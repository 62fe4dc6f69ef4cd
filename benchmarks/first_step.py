"""From the start of the process to the end of the first training step.

    python benchmarks/first_step.py --device cuda                 # a TE Llama of 1 B
    python benchmarks/first_step.py --device cpu --model tiny --json out.json

Each run is a process of its own, eager construction and ours taking turns, and is
printed as it ends; then medians of the runs, in seconds, for each stage. Of several
rounds the first fills the page cache and does not count; with `--repeats 1` there is
one alone. Host memory is the process's peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

STAGES = ("python, torch", "library", "device", "build", "fill", "step 1", "step 2")
WAYS = ("eager", "materialize")
BATCH, LENGTH = 1, 256


class Clock:
    """Seconds of each stage, from the time at which the parent started the process."""

    def __init__(self, started: float) -> None:
        self._last = started
        self.seconds: list[float] = []

    def stage(self) -> None:
        """End a stage."""
        now = time.time()
        self.seconds.append(now - self._last)
        self._last = now


def child(arguments: argparse.Namespace) -> None:
    """Build, fill and train for two steps; print the seconds as JSON."""
    clock = Clock(arguments.started)
    import torch

    clock.stage()
    from construct_models import SHAPES, computes_in
    from construct_ways import ways_of

    shape = SHAPES[arguments.model]
    ways = {way.name: way for way in ways_of(shape, arguments.recipe, arguments.device)}
    start = {"eager": "eager on", "materialize": "meta, materialize"}[arguments.way]
    way = next(way for name, way in ways.items() if name.startswith(start))
    if shape.library == "te":
        import transformer_engine.pytorch  # noqa: F401
    clock.stage()
    device = torch.device(arguments.device)
    torch.zeros(1, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    clock.stage()
    model = way.build()
    wait()
    clock.stage()
    model = way.fill(model)
    wait()
    clock.stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        if shape.library == "te":
            size = (LENGTH, BATCH, shape.hidden)
            x = torch.randn(size, device=device, dtype=torch.bfloat16)
            with computes_in(arguments.recipe):
                loss = model(x).float().square().mean()
        else:
            ids = torch.randint(shape.vocabulary, (BATCH, LENGTH), device=device)
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        clock.stage()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"seconds": clock.seconds, "host": host, "device": peak}))


def parent(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Let the ways take turns, each run in a process of its own."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    warm_ups = int(arguments.repeats > 1)
    for round_ in range(arguments.repeats + warm_ups):
        for way in WAYS:
            command = [sys.executable, str(HERE), "--way", way]
            command += ["--device", arguments.device, "--model", arguments.model]
            command += ["--recipe", arguments.recipe, "--started", str(time.time())]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
            run = json.loads(done.stdout.splitlines()[-1])
            print(_line(way, run, counts=round_ >= warm_ups), flush=True)
            if round_ >= warm_ups:
                found[way].append(run)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _line(way: str, run: dict[str, Any], *, counts: bool) -> str:
    stages = zip(STAGES, run["seconds"], strict=True)
    cells = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages)
    return f"{way}{'' if counts else ' (does not count)'}: {cells} s"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Put stages under each other, ways beside each other."""
    rows = [f"{'':16}" + "".join(f"{way:>14}" for way in WAYS)]
    for index, stage in enumerate(STAGES):
        cells = [median(run["seconds"][index] for run in found[way]) for way in WAYS]
        rows.append(f"{stage:16}" + "".join(f"{cell:12.3f} s" for cell in cells))
    upto = STAGES.index("step 1") + 1
    totals = [median(sum(run["seconds"][:upto]) for run in found[way]) for way in WAYS]
    rows.append(f"{'to step 1':16}" + "".join(f"{cell:12.3f} s" for cell in totals))
    for what in ("host", "device"):
        peaks = [median(run[what] for run in found[way]) / 1e9 for way in WAYS]
        rows.append(f"{what + ' peak':16}" + "".join(f"{p:11.2f} GB" for p in peaks))
    return "\n".join(rows)


def main() -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="te-1b")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        child(arguments)
        return 0
    found = parent(arguments)
    print(f"{arguments.model}, {arguments.recipe}, median of {arguments.repeats}")
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

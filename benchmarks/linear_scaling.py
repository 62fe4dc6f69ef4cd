"""Measures what the bookkeeping costs, and that it grows linearly.

    python benchmarks/linear_scaling.py [--json FILE] [--only scaling|overhead|memory]

Three measurements, on one CPU core:

* scaling: CPU seconds of inventory, plan, rebind (exchange of contents) and audit
  (snapshot included) for small parameters, five to a module, at 1/10, 1/3 and all of
  100,000. Target: at most 10 s together.
* overhead: `materialize` of a GPT-2-sized model (124 M parameters) against the bare
  loop, `to_empty` and `reset_parameters`. Target: at most 15 % more.
* memory: peak resident memory of the same in a process of its own. Target: the model,
  its largest tensor, and 50 MB.

CPU seconds are of the process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import deferred_init as di  # noqa: E402
from deferred_init.audit import run_audit, take_snapshot  # noqa: E402
from deferred_init.handlers.ecosystems import load_handlers  # noqa: E402
from deferred_init.inventory import take_inventory  # noqa: E402
from deferred_init.planner import make_plan  # noqa: E402
from deferred_init.rebind import exchange  # noqa: E402
from deferred_init.validate import make_request  # noqa: E402

PER_MODULE = 5
NUM_PARAMETERS = 100_000
TARGET_S = 10.0
TARGET_OVERHEAD = 0.15
TARGET_EXTRA_BYTES = 50_000_000


class Small(nn.Module):
    """A few small parameters with an initialization of their own."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(PER_MODULE):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(4)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for param in self.parameters(recurse=False):
                param.fill_(1.0)


class Block(nn.Module):
    """One GPT-2 layer, as far as its parameters go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class GPT2(nn.Module):
    """The parameters of GPT-2 small in classes of torch.nn."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(50257, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)


def small_modules(num_parameters: int) -> nn.Module:
    """Build modules in a tree of three levels."""
    num_modules = num_parameters // PER_MODULE
    root = nn.ModuleList()
    for start in range(0, num_modules, 100):
        count = min(100, num_modules - start)
        root.append(nn.ModuleList(Small() for _ in range(count)))
    return root


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def _exchange_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        exchange(old, new)


def scaling_row(num_parameters: int) -> dict[str, float]:
    """Measure the stages on one size."""
    with torch.device("meta"):
        model = small_modules(num_parameters)
    request = make_request("cpu", None, rng="eager", verify="fast", dtype=None)
    row: dict[str, float] = {"parameters": num_parameters}
    row["inventory"], inventory = _timed(lambda: take_inventory((model,)))
    row["plan"], plan = _timed(lambda: make_plan(inventory, request))
    assert len(plan.steps) == num_parameters // PER_MODULE
    row["snapshot"], expected = _timed(lambda: take_snapshot((model,)))
    pairs = [
        (p, nn.Parameter(torch.ones(4), requires_grad=p.requires_grad))
        for p in model.parameters()
    ]
    row["rebind"], _ = _timed(lambda: _exchange_all(pairs))
    row["audit"], findings = _timed(
        lambda: run_audit((model,), expected=expected, device=request.device)
    )
    assert findings == [], str(findings[0])
    stages = ("inventory", "plan", "snapshot", "rebind", "audit")
    row["total"] = sum(row[stage] for stage in stages)
    row["us_per_parameter"] = row["total"] / num_parameters * 1e6
    return row


def scaling(sizes: list[int]) -> dict[str, Any]:
    """Measure all sizes; the largest has a target."""
    load_handlers()
    scaling_row(1000)  # fills caches
    rows = [scaling_row(size) for size in sizes]
    return {
        "rows": rows,
        "total_s": rows[-1]["total"],
        "target_s": TARGET_S,
        "growth": rows[-1]["us_per_parameter"] / rows[0]["us_per_parameter"],
        "ok": rows[-1]["total"] <= TARGET_S,
    }


def _bare(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def overhead(repeats: int) -> dict[str, Any]:
    """Compare `materialize` with the bare loop, taking turns."""
    times: dict[str, list[float]] = {"bare": [], "materialize": []}
    for _ in range(repeats):
        for name, work in (
            ("bare", _bare),
            ("materialize", lambda m: di.materialize(m, "cpu", progress=False)),
        ):
            with torch.device("meta"):
                model = GPT2()
            seconds, _ = _timed(lambda work=work, model=model: work(model))
            times[name].append(seconds)
            del model
    bare, ours = (statistics.median(times[n]) for n in ("bare", "materialize"))
    return {
        "bare_s": bare,
        "materialize_s": ours,
        "overhead": ours / bare - 1,
        "target": TARGET_OVERHEAD,
        "ok": ours / bare - 1 <= TARGET_OVERHEAD,
    }


def memory_here() -> dict[str, Any]:
    """Materialize in this process and compare its peak with what it began with."""
    with torch.device("meta"):
        model, warm = GPT2(), nn.Linear(2, 2)
    di.materialize(warm, "cpu", progress=False)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    report = di.materialize(model, "cpu", progress=False)
    assert report.ok
    peak = _status_bytes("VmHWM") - before
    allowed = sum(sizes) + max(sizes) + TARGET_EXTRA_BYTES
    return {
        "model_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "peak_bytes": peak,
        "allowed_bytes": allowed,
        "ok": peak <= allowed,
    }


def memory() -> dict[str, Any]:
    """Measure in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory-here"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def _print(results: dict[str, Any]) -> None:
    if "scaling" in results:
        rows = results["scaling"]["rows"]
        print("".join(f"{name:>17}" for name in rows[0]))
        for row in rows:
            print("".join(f"{value:>17,.2f}" for value in row.values()))
    for name, result in results.items():
        facts = {k: v for k, v in result.items() if k != "rows"}
        shown = ", ".join(
            f"{k} {v:,.3f}" if isinstance(v, float) else f"{k} {v:,}"
            for k, v in facts.items()
            if k != "ok"
        )
        print(f"{name}: {'ok' if result['ok'] else 'MISSED'}; {shown}")


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to a file")
    parser.add_argument("--only", choices=("scaling", "overhead", "memory"))
    parser.add_argument("--parameters", type=int, default=NUM_PARAMETERS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_here:
        print(json.dumps(memory_here()))
        return 0
    largest = options.parameters
    work = {
        "scaling": lambda: scaling([largest // 10, largest // 3, largest]),
        "overhead": lambda: overhead(options.repeats),
        "memory": memory,
    }
    names = [options.only] if options.only else list(work)
    results = {name: work[name]() for name in names}
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

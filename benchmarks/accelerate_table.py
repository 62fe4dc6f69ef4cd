"""A Hugging Face Llama through `accelerate launch`: with the plugin, and without.

    python benchmarks/accelerate_table.py --json table.json
    python benchmarks/accelerate_table.py --sharding one --shape tiny \
        --config examples/accelerate/cpu.yaml --recipe bf16 --precision no

A row is one way to make the model, in one recipe, on one device or under FSDP2 with
one rank; see `accelerate_script.py`. Each sharding is one process, and they take turns;
what accelerate constructs on the CPU is constructed once, meanwhile, by another one.
Seconds are those of a process which has warmed up: it has trained a model of one layer
in every way and recipe before the first row. Host memory is what `build` and `prepare`
add at most. Initial values, losses and trained values of `deferred` and `eager` have to
be the same bits; the exit code says so. `eager_again` is the control: where it differs
from `eager`, the training does not repeat itself, whoever made the model. A case that
fails, or that is not reached in time, is a row that says so; a row is printed and kept
as soon as it is there, accelerate's own, which take long, last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "accelerate_script.py"
CONFIGS = {
    "one": ROOT / "examples" / "accelerate" / "single.yaml",
    "fsdp2": ROOT / "examples" / "accelerate" / "fsdp2.yaml",
}
WAYS = ("deferred", "eager", "eager_again", "accelerate")
RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")
OF_ACCELERATE = ("bf16", "fp8_delayed")  # of Hopper's recipes it knows one
Row = dict[str, Any]


class Launch:
    """One process of `accelerate launch`; its rows as they come."""

    def __init__(
        self, sharding: str, options: argparse.Namespace, folder: Path, rows: list[Row]
    ) -> None:
        self._sharding, self._options, self._rows = sharding, options, rows
        self._missing = cases_of(options)
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            self._command(folder),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _command(self, folder: Path) -> list[str]:
        options = self._options
        config = options.config or CONFIGS[self._sharding]
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(config), "--num_processes", "1", str(SCRIPT)]
        command += ["--shape", options.shape, "--lock", str(folder / "lock")]
        command += ["--case", *(":".join(case) for case in self._missing)]
        command += ["--untied"] if options.untied else []
        command += ["--precision", options.precision] if options.precision else []
        if constructs_ahead(options):
            command += ["--original", str(folder / "original.pt")]
        return command

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"way"'):
                row = {"sharding": self._sharding, **json.loads(line)}
                row["at_s"] = round(time.monotonic() - self._started, 1)
                self._missing.remove((row["way"], row["recipe"]))
                self._add(row)
            else:
                print(line, end="", flush=True)

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        if self._options.json:  # what was measured stays if the time runs out
            self._options.json.write_text(json.dumps(self._rows, indent=1) + "\n")

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, or make one; what was not measured becomes rows too."""
        self._thread.join(timeout_s)
        end = f"not reached within {self._options.limit_s:g} s"
        if self._thread.is_alive():
            end_all(self._process)
            self._thread.join(5)
        else:
            end = f"its process ended before, with status {self._process.wait()}"
        for way, recipe in self._missing:
            tied = not self._options.untied
            row = {"sharding": self._sharding, "way": way, "recipe": recipe}
            self._add({**row, "tied": tied, "error": end})


def cases_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return ways and recipes; those that are compared follow one another."""
    ours = [way for way in options.way if way != "accelerate"]
    cases = [(way, recipe) for recipe in options.recipe for way in ours]
    if "accelerate" in options.way:
        known = [recipe for recipe in options.recipe if recipe in OF_ACCELERATE]
        cases += [("accelerate", recipe) for recipe in known]
    return cases


def end_all(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, in sessions of their own as well."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def constructs_ahead(options: argparse.Namespace) -> bool:
    """Whether a process of its own constructs on the CPU, which takes long."""
    return "accelerate" in options.way and options.shape != "tiny"


def measure(options: argparse.Namespace) -> list[Row]:
    """Start a process per sharding; all rows."""
    rows: list[Row] = []
    started = time.monotonic()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        ahead = None
        if constructs_ahead(options):
            command = [sys.executable, str(SCRIPT), "--shape", options.shape]
            command += ["--construct", str(folder / "original.pt")]
            command += ["--untied"] if options.untied else []
            ahead = subprocess.Popen(command, cwd=ROOT)
        launches = [Launch(name, options, folder, rows) for name in options.sharding]
        for launch in launches:
            launch.wait(max(0.0, options.limit_s - (time.monotonic() - started)))
        if ahead is not None:
            ahead.kill()
            ahead.wait()
    return rows


def table(rows: list[Row]) -> str:
    """Put the rows under each other, those of one case together."""
    heads = ["recipe", "sharding", "way", "losses", "fp8", "trained", "build"]
    heads += ["prepare", "to step 1", "host growth", "device peak"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=_place):
        cells = [row["recipe"], row["sharding"] + ("" if row["tied"] else ", untied")]
        cells.append(row["way"])
        if "error" in row:
            cells += [row["error"][:160]] + [""] * (len(heads) - 4)
        else:
            cells += _measured(row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _measured(row: Row) -> list[str]:
    seconds = row["seconds"]
    first = sum(seconds[name] for name in ("build", "prepare", "step 1"))
    return [
        " ".join(f"{loss:.5f}" for loss in row["losses"]),
        "yes" if all(row["fp8"]) else "no",
        f"{row['trained']} of {row['tensors']}",
        *(f"{value:.2f} s" for value in (seconds["build"], seconds["prepare"], first)),
        *(f"{row[f'{what}_bytes'] / 1e9:.2f} GB" for what in _MEMORY),
    ]


_MEMORY = ("host_growth", "device_peak")


def _place(row: Row) -> tuple[int, str, bool, int]:
    recipe, way = RECIPES.index(row["recipe"]), WAYS.index(row["way"])
    return recipe, row["sharding"], not row["tied"], way


def differences(rows: list[Row]) -> list[str]:
    """Compare the bits of values and losses; say what failed in our own ways."""
    problems = [
        f"{row['recipe']}, {row['sharding']}, {row['way']}: {row['error']}"
        for row in rows
        if "error" in row and row["way"] != "accelerate"
    ]
    bits: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if "bits" in row and row["way"] != "accelerate":
            case = (row["recipe"], row["sharding"], row["tied"])
            bits.setdefault(case, {})[row["way"]] = row["bits"]
    for case, found in bits.items():
        for one, other in (("deferred", "eager"), ("eager", "eager_again")):
            if {one, other} <= found.keys() and found[one] != found[other]:
                differ = {one: found[one], other: found[other]}
                problems.append(f"{case}: {one} and {other} differ: {differ}")
    return problems


def main() -> int:
    """Measure; print the table; 1 if something of ours is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sharding", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--shape", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--untied", action="store_true", help="a head of its own")
    parser.add_argument("--config", type=Path, help="another configuration file")
    parser.add_argument("--precision", help="instead of bf16 or fp8")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options)
    print(table(rows))
    for row in rows:
        if "traceback" in row:
            print(f"\n{row['way']}, {row['recipe']}:\n{row['traceback'][-2500:]}")
    problems = differences(rows)
    print("\n".join(problems) or "deferred and eager: the same bits")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

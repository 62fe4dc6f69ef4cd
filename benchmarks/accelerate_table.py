"""A Hugging Face Llama through `accelerate launch`: with the plugin, and without.

    python benchmarks/accelerate_table.py --recipe bf16 fp8_current --json rows.json
    python benchmarks/accelerate_table.py --way accelerate --recipe fp8_delayed
    python benchmarks/accelerate_table.py --merge rows*.json --json table.json
    python benchmarks/accelerate_table.py --config examples/accelerate/cpu.yaml \
        --shape tiny --recipe bf16 --precision no

Each row is a process of its own: one way to build the model, one recipe, on one device
or under FSDP2 with one rank. Seconds are from the start of `accelerate launch`; the
host memory is what the peak grew by from before the build to after `prepare`. The
losses of `deferred` and `eager` have to be the same bits; the exit code says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "accelerate_script.py"
CONFIGS = {
    "one": ROOT / "examples" / "accelerate" / "single.yaml",
    "fsdp2": ROOT / "examples" / "accelerate" / "fsdp2.yaml",
}
WAYS = ("deferred", "eager", "accelerate")
RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")
Row = dict[str, Any]


def launch(way: str, recipe: str, sharding: str, arguments: argparse.Namespace) -> Row:
    """Run the script once; what it printed, or why it failed."""
    row: Row = {"way": way, "recipe": recipe, "sharding": sharding}
    row["tied"] = not arguments.untied
    precision = arguments.precision or ("bf16" if recipe == "bf16" else "fp8")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(arguments.config or CONFIGS[sharding])]
    command += ["--num_processes", "1", "--mixed_precision", precision, str(SCRIPT)]
    command += ["--way", way, "--recipe", recipe, "--shape", arguments.shape]
    command += ["--untied"] if arguments.untied else []
    command += ["--started", str(time.time())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        row["error"] = reason(done.stderr)
        row["stderr"] = done.stderr[-6000:]
        return row
    row.update(json.loads(printed[-1]))
    return row


def reason(stderr: str) -> str:
    """Return the line of a traceback that says why."""
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line.split("]: ", 1)[-1] for line in lines]  # torchrun's `[rank0]: `
    found = [
        line
        for line in lines
        if line.split(":")[0].endswith(("Error", "Exception")) and ":" in line
    ]
    own = [line for line in found if "CalledProcessError" not in line]
    own = [line for line in own if "ChildFailedError" not in line]
    return (own or found or lines or ["no output"])[0]


def table(rows: list[Row]) -> str:
    """Put the rows under each other, those of one case together."""
    heads = (
        "recipe",
        "sharding",
        "way",
        "losses",
        "fp8",
        "trained",
        "build",
        "prepare",
    )
    lines = [
        "| " + " | ".join((*heads, "to step 1", "host growth", "device peak")) + " |",
        "|---" * (len(heads) + 3) + "|",
    ]
    for row in sorted(rows, key=_place):
        cells = [row["recipe"], row["sharding"] + ("" if row["tied"] else ", untied")]
        cells.append(row["way"])
        if "error" in row:
            cells += [row["error"][:160]] + [""] * (len(heads) - 1)
        else:
            cells += _measured(row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _measured(row: Row) -> list[str]:
    seconds = row["seconds"]
    first = sum(seconds[name] for name in ("start", "build", "prepare", "step 1"))
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
    """Compare the bits of the losses; say what failed in our own ways."""
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
        if len(found) == 2 and found["deferred"] != found["eager"]:
            problems.append(f"{case}: deferred and eager have other losses")
    return problems


def main() -> int:
    """Measure or merge; print the table; 1 if something of ours is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=["deferred", "eager"])
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sharding", nargs="+", default=["one"], choices=CONFIGS)
    parser.add_argument("--shape", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--untied", action="store_true", help="a head of its own")
    parser.add_argument("--config", type=Path, help="another configuration file")
    parser.add_argument("--precision", help="instead of bf16 or fp8")
    parser.add_argument("--merge", nargs="+", type=Path, help="rows measured before")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.merge:
        rows = [row for path in arguments.merge for row in json.loads(path.read_text())]
    else:
        rows = []
        for sharding in arguments.sharding:
            for recipe in arguments.recipe:
                for way in arguments.way:
                    rows.append(launch(way, recipe, sharding, arguments))
                    if arguments.json:  # what was measured stays if time runs out
                        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"\n{row['way']}, {row['recipe']}:\n{row['stderr'][-2500:]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    problems = differences(rows)
    print("\n".join(problems) or "deferred and eager: the same losses, bit for bit")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

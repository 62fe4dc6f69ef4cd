"""A Hugging Face Llama through `accelerate launch`: with the plugin, and without.

    python benchmarks/accelerate_table.py --sharding one --json one.json
    python benchmarks/accelerate_table.py --sharding fsdp2 --json fsdp2.json
    python benchmarks/accelerate_table.py --merge one.json fsdp2.json --json table.json
    python benchmarks/accelerate_table.py --config examples/accelerate/cpu.yaml \
        --shape tiny --recipe bf16 --precision no

A row is one way to make the model, in one recipe, on one device or under FSDP2 with one
rank; see `accelerate_script.py`. Seconds are those of a process in which a small model
was trained the same way before; host memory is what `build` and `prepare` add at most.
The losses of `deferred` and `eager` have to be the same bits; the exit code says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
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


def launch(sharding: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Run the script once; yield its rows as they come."""
    config = arguments.config or CONFIGS[sharding]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(config), "--num_processes", "1", str(SCRIPT)]
    command += ["--shape", arguments.shape, "--recipe", *arguments.recipe]
    command += ["--way", *arguments.way]
    command += ["--untied"] if arguments.untied else []
    command += ["--precision", arguments.precision] if arguments.precision else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield {"sharding": sharding, **json.loads(line)}
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")


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
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sharding", default="one", choices=CONFIGS)
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
        for row in launch(arguments.sharding, arguments):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json:  # what was measured stays if the time runs out
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"\n{row['way']}, {row['recipe']}:\n{row['traceback'][-2500:]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    problems = differences(rows)
    print("\n".join(problems) or "deferred and eager: the same losses, bit for bit")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Every architecture of transformers and timm: deferred equals eager, bit for bit.

    python benchmarks/zoo.py transformers --out transformers.jsonl
    python benchmarks/zoo.py timm --out timm.jsonl --sample 60
    python benchmarks/zoo.py table transformers.jsonl timm.jsonl
    python benchmarks/zoo.py meta --out meta.jsonl     # built on meta, not recorded

A run appends one JSON line for each case and skips the cases that its output file
already holds, so it can be stopped and started again. A mode is a function from a
`Case` to a `Result` (see `MODES`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zoo_cases import SETS, Case, TooLargeError
from zoo_differences import differences, tensors_of
from zoo_result import Result, TooSlowError, cause, limit, names_in, seed_everything

import deferred_init.record as record

# -- modes -------------------------------------------------------------------------


def by_recording(case: Case, *, limit_s: float) -> Result:
    """Build a case eagerly and by recording and replaying it, and compare."""
    result = Result(name=case.name, status="equal")
    with limit(limit_s):
        try:
            build = case.prepare()
            seed_everything()
            start = time.perf_counter()
            eager = build()
        except TooSlowError:
            raise
        except TooLargeError as error:
            result.status, result.cause = "too large", str(error)
            return result
        except Exception as error:  # noqa: BLE001  an architecture's own trouble
            result.status, result.cause = "unbuildable", cause(error)
            return result
        result.seconds["eager"] = round(time.perf_counter() - start, 3)
        state = torch.get_rng_state()
        result.num_parameters = sum(p.numel() for p in eager.parameters())
        result.num_tensors = len(tensors_of(eager))
        try:
            model = _recorded(build, result)
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001  that is the finding
            result.status, result.cause = "error", cause(error)
            return result
        found = differences(eager, model)
        if not torch.equal(state, torch.get_rng_state()):
            found.append("the final generator state differs")
        if found:
            result.status = "different"
            result.cause = f"{len(found)}: " + "; ".join(found[:4])
    return result


def _recorded(build: Callable[[], nn.Module], result: Result) -> nn.Module:
    """Record a case and replay it."""
    seed_everything()
    start = time.perf_counter()
    model = record.deferred_init(build)
    middle = time.perf_counter()
    record.materialize_module(model)
    result.seconds["record"] = round(middle - start, 3)
    result.seconds["replay"] = round(time.perf_counter() - middle, 3)
    return model


MODES: dict[str, Callable[..., Result]] = {"record": by_recording}


# -- running -----------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Run the cases of one set and append their results."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    # Uninitialized memory becomes NaN, so that it can be compared.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    cases = list(SETS[args.set]())
    if args.only:
        cases = [case for case in cases if args.only in case.name]
    if args.sample:
        step = max(1, len(cases) // args.sample)
        cases = cases[::step][: args.sample]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        cases = cases[index::count]
    done = names_in(args.out) if args.out else set()
    counts: Counter[str] = Counter()
    for case in cases:
        if case.name in done:
            continue
        try:
            result = MODES[args.mode](case, limit_s=args.limit)
        except TooSlowError:
            result = Result(name=case.name, status="timeout")
        counts[result.status] += 1
        line = json.dumps({"mode": args.mode, **asdict(result)})
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")
        if result.status not in ("equal", "unbuildable") or not args.out:
            print(line, flush=True)
        gc.collect()
    print(dict(counts), flush=True)
    return 1 if counts["different"] + counts["error"] else 0


def table(args: argparse.Namespace) -> int:
    """Print what result files hold: the counts, and each exception with its cause."""
    results = [
        json.loads(line)
        for path in args.files
        for line in path.read_text().splitlines()
    ]
    counts = Counter((r["name"].partition("/")[0], r["status"]) for r in results)
    print("| set | status | cases |\n|---|---|---|")
    for (name, status), count in sorted(counts.items()):
        print(f"| {name} | {status} | {count} |")
    print("\n| case | status | cause |\n|---|---|---|")
    for r in results:
        if r["status"] != "equal":
            print(f"| {r['name']} | {r['status']} | {r['cause'].replace('|', '/')} |")
    return 0


def main() -> int:
    """Read the command line and run."""
    if sys.argv[1:2] == ["meta"]:
        import zoo_meta

        return zoo_meta.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="set", required=True)
    for name in SETS:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path)
        command.add_argument("--mode", choices=sorted(MODES), default="record")
        command.add_argument("--sample", type=int, default=0)
        command.add_argument("--only", default="")
        command.add_argument("--shard", default="", help="every n-th case: 3/16")
        command.add_argument("--limit", type=float, default=60.0, help="seconds a case")
    commands.add_parser("table").add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    return table(args) if args.set == "table" else run(args)


if __name__ == "__main__":
    raise SystemExit(main())

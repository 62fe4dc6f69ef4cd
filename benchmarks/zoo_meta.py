"""Every Hugging Face architecture, built on meta and materialized: right or refused.

    python benchmarks/zoo_meta.py --out meta.jsonl
    python benchmarks/zoo_meta.py --build empty_weights --rng by_name --sample 40
    python benchmarks/zoo_meta.py --table meta.jsonl

Status of a case: `equal` (every tensor, tie and the final generator state are those
of eager construction), `ok` (all but random values, which have other values, as they
would with another seed), `refused` (by name, in the plan), `unbuildable` (eagerly, or
on meta, so that there is nothing to do), and WRONG. Where eager construction yields a
model that can run on made-up inputs, the other one has to run too, with the same loss
if `equal` and with a finite one if `ok`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import logging
import math
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
sys.path.insert(0, str(Path(__file__).resolve().parent))

from zoo_configs import iter_cases
from zoo_differences import differences
from zoo_result import (
    SEED,
    Result,
    TooSlowError,
    cause,
    limit,
    names_in,
    seed_everything,
)
from zoo_step import train_step

import deferred_init as di

Build = Callable[[], nn.Module]


def _on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def _empty_weights(build: Build, *, include_buffers: bool) -> nn.Module:
    import accelerate

    with accelerate.init_empty_weights(include_buffers=include_buffers):
        return build()


BUILDS: dict[str, Callable[[Build], nn.Module]] = {
    "device": _on_meta,
    "empty_weights": lambda build: _empty_weights(build, include_buffers=False),
    "empty_all": lambda build: _empty_weights(build, include_buffers=True),
    "to_meta": lambda build: build().to("meta"),
    "deepcopy": lambda build: copy.deepcopy(_on_meta(build)),
}


def by_meta(
    name: str, build: Build, *, limit_s: float, how: str = "device", rng: str = "eager"
) -> Result:
    """Build a case eagerly and on meta, materialize the latter, and compare."""
    result = Result(name=name, status="equal")
    with limit(limit_s):
        seed_everything()
        try:
            eager = build()
            state = torch.get_rng_state()
            model = BUILDS[how](build)
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001 - an architecture's own trouble
            result.status, result.cause = "unbuildable", cause(error)
            return result
        result.num_parameters = sum(p.numel() for p in eager.parameters())
        seed_everything()
        start = time.perf_counter()
        try:
            di.materialize(model, "cpu", seed=SEED, rng=rng, progress=False)
        except di.PlanError as error:
            result.status, result.cause = "refused", " ".join(str(error).split())
            return result
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001 - that is the finding
            result.status, result.cause = "WRONG", cause(error)
            return result
        result.seconds["materialize"] = round(time.perf_counter() - start, 3)
        found = differences(eager, model)
        # `init_empty_weights` puts an attribute of this name on tied tensors.
        found = [text for text in found if "[] != ['requires_grad']" not in text]
        if rng == "eager" and not torch.equal(state, torch.get_rng_state()):
            found.append("the final generator state differs")
        _judge(result, build, eager, found)
        if result.status != "WRONG":
            _run(result, eager, model)
    return result


def _judge(result: Result, build: Build, eager: nn.Module, found: list[str]) -> None:
    """Other values of what is random are not wrong; anything else is."""
    if not found:
        return
    torch.manual_seed(SEED + 1)
    random = {text.split(": ")[0] for text in differences(eager, build())}
    worse = [
        text
        for text in found
        if "generator state" not in text
        and not (text.split(": ")[0] in random and "values differ" in text)
    ]
    result.status = "WRONG" if worse else "ok"
    shown = worse or found
    result.cause = f"{len(shown)}: " + "; ".join(shown[:4])


def _run(result: Result, eager: nn.Module, model: nn.Module) -> None:
    """Compare one training step."""
    expected, reason = train_step(eager)
    if expected is None or not math.isfinite(expected):
        result.cause = result.cause or f"not run: {reason or expected}"
        return
    loss, reason = train_step(model)
    same = loss == expected if result.status == "equal" else True
    if loss is None or not math.isfinite(loss) or not same:
        result.status = "WRONG"
        result.cause = f"loss {loss} {reason}, expected {expected}"
    result.seconds["loss"] = expected


def main(argv: list[str] | None = None) -> int:
    """Run the cases, or print the table of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--build", choices=sorted(BUILDS), default="device")
    parser.add_argument("--rng", choices=("eager", "by_name"), default="eager")
    parser.add_argument(
        "--tree", action="store_true", help="without constructing models again"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a case")
    args = parser.parse_args(argv)
    if args.table:
        return _table(args.table)
    if args.tree:
        _follow_the_tree()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    # Uninitialized memory becomes NaN, so that it can be compared.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = [(f"{kind}/{name}", build) for name, build, kind in iter_cases()]
    cases = [case for case in cases if args.only in case[0]]
    if args.sample:
        cases = cases[:: max(1, len(cases) // args.sample)]
    done = names_in(args.out) if args.out else set()
    counts: Counter[str] = Counter()
    with args.out.open("a") if args.out else contextlib.nullcontext(sys.stdout) as file:
        for name, build in cases:
            if name in done:
                continue
            try:
                result = by_meta(
                    name, build, limit_s=args.limit, how=args.build, rng=args.rng
                )
            except TooSlowError:
                result = Result(name=name, status="timeout")
            counts[result.status] += 1
            print(json.dumps(asdict(result)), file=file, flush=True)
            gc.collect()
    print(dict(counts))
    return 1 if counts["WRONG"] else 0


def _follow_the_tree() -> None:
    """Leave everything to what serves models that were changed after construction."""
    from deferred_init.handlers import hf_constructor

    hf_constructor.HFConstructor.claim_tree = lambda self, site, request: None


def _table(path: Path) -> int:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(r["status"] for r in results)
    ran = sum("loss" in r["seconds"] for r in results)
    print("| status | cases |\n|---|---|")
    for status, count in counts.most_common():
        print(f"| {status} | {count} |")
    print(f"\n{ran} of them ran one training step, with a finite loss.\n")
    print("| case | status | cause |\n|---|---|---|")
    for r in results:
        if r["status"] != "equal":
            print(f"| {r['name']} | {r['status']} | {r['cause'].replace('|', '/')} |")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

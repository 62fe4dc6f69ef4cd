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
import contextlib
import copy
import functools
import gc
import json
import logging
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deferred_init.record as record

MAX_PARAMETERS = 60_000_000
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture.

    Attributes:
        name: Its name.
        prepare: Finds out how to build it and returns a function that does, as
            many times as wanted, each time as if for the first time.
    """

    name: str
    prepare: Callable[[], Callable[[], nn.Module]]


@dataclass(kw_only=True)
class Result:
    """What came of one case.

    `status` is `equal`, `different`, `error`, `unbuildable` (eagerly), `too large`
    or `timeout`.
    """

    name: str
    status: str
    cause: str = ""
    num_parameters: int = 0
    num_tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class TooLargeError(Exception):
    """An architecture has more than `MAX_PARAMETERS` parameters, however shrunken."""


class TooSlowError(Exception):
    """A case took longer than its limit."""


# -- what is compared --------------------------------------------------------------


def seed_everything() -> None:
    """Seed every generator that a constructor may use."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and tensor attributes, duplicates kept."""
    found: dict[str, Tensor] = {}
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    found[f"{prefix}.{name}"] = tensor
        for name, item in vars(owner).items():
            if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
                continue
            items = item if isinstance(item, (list, tuple)) else [item]
            for index, part in enumerate(items):
                if isinstance(part, Tensor):
                    found[f"{prefix}.{name}[{index}]"] = part
    return found


def differences(eager: nn.Module, other: nn.Module) -> list[str]:
    """List what differs between two models, by name; empty if nothing does."""
    left, right = tensors_of(eager), tensors_of(other)
    if left.keys() != right.keys():
        return [f"names differ: {sorted(left.keys() ^ right.keys())[:5]}"]
    found = []
    for name, tensor in left.items():
        what = _difference(tensor, right[name])
        if what:
            found.append(f"{name}: {what}")
    if _sharing(left) != _sharing(right):
        found.append("ties or shared storages differ")
    state = {name: m.training for name, m in eager.named_modules()}
    if state != {name: m.training for name, m in other.named_modules()}:
        found.append("training flags differ")
    return found


def _difference(a: Tensor, b: Tensor) -> str:
    """Say in what two tensors differ; empty if in nothing."""
    for what in ("__class__", "shape", "dtype", "device", "requires_grad", "is_leaf"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} != {getattr(b, what)}"
    if a.layout == torch.strided and a.stride() != b.stride():
        return f"stride {a.stride()} != {b.stride()}"
    if vars(a).keys() != vars(b).keys():
        return f"attributes {sorted(vars(a))} != {sorted(vars(b))}"
    if a.is_meta:
        return ""
    raw_a, raw_b = (t.detach().contiguous().flatten() for t in (a, b))
    if raw_a.is_complex():
        raw_a, raw_b = torch.view_as_real(raw_a), torch.view_as_real(raw_b)
    if torch.equal(raw_a.view(torch.uint8), raw_b.view(torch.uint8)):
        return ""
    return f"{int((raw_a != raw_b).sum())} of {a.numel()} values differ"


def _sharing(tensors: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return for each tensor the first name of its object and of its storage."""
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    same_object, same_storage = [], []
    for name, tensor in tensors.items():
        same_object.append(objects.setdefault(id(tensor), name))
        if tensor.layout == torch.strided and tensor.numel():
            key = tensor.untyped_storage()._cdata
            same_storage.append(storages.setdefault(key, name))
    return same_object, same_storage


# -- modes -------------------------------------------------------------------------


def by_recording(case: Case, *, limit_s: float) -> Result:
    """Build a case eagerly and by recording and replaying it, and compare."""
    result = Result(name=case.name, status="equal")
    with _limit(limit_s):
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
            result.status, result.cause = "unbuildable", _cause(error)
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
            result.status, result.cause = "error", _cause(error)
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


# -- cases -------------------------------------------------------------------------


def transformers_cases() -> Iterator[Case]:
    """Yield every architecture of `AutoModel` and `AutoModelForCausalLM`."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind, mapping in (
        ("AutoModel", auto.MODEL_MAPPING),
        ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        names = sorted(mapping._model_mapping)
        for model_type in names:
            yield Case(
                name=f"{kind}/{model_type}",
                prepare=functools.partial(_transformers, kind, model_type),
            )


def _transformers(kind: str, model_type: str) -> Callable[[], nn.Module]:
    """Return a function that builds one architecture from a shrunken config."""
    import transformers

    config = _choose(kind, model_type)
    auto: Any = getattr(transformers, kind)
    return lambda: auto.from_config(copy.deepcopy(config))


def _choose(kind: str, model_type: str) -> Any:
    """Return the most shrunken configuration that builds within the limit."""
    import transformers
    from zoo_shrink import candidates

    auto = getattr(transformers, kind)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]()
    problems = []
    too_large = False
    for level, candidate in candidates(config):
        try:
            with torch.device("meta"):
                probe = auto.from_config(copy.deepcopy(candidate))
            num = sum(p.numel() for p in probe.parameters())
            if num > MAX_PARAMETERS:
                problems.append(f"{level}: {num:,} parameters")
                too_large = True
                continue
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001  try the eager build
            if "meta" not in str(error) and level != "small":
                problems.append(f"{level}: {_cause(error)}")
                continue
        try:
            seed_everything()
            auto.from_config(copy.deepcopy(candidate))
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001  try the next candidate
            problems.append(f"{level}: {_cause(error)}")
            continue
        return candidate
    kind_of_error = TooLargeError if too_large else ValueError
    raise kind_of_error("; ".join(problems))


def timm_cases() -> Iterator[Case]:
    """Yield every timm architecture with fewer than `MAX_PARAMETERS` parameters."""
    import timm

    for name in timm.list_models():
        yield Case(name=f"timm/{name}", prepare=functools.partial(_timm, name))


def _timm(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds one timm model."""
    import timm

    num = 0
    with torch.device("meta"), contextlib.suppress(Exception):
        num = sum(p.numel() for p in timm.create_model(name).parameters())
    if num > MAX_PARAMETERS:
        raise TooLargeError(f"{num:,} parameters")
    return lambda: timm.create_model(name)  # type: ignore[no-any-return]


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "transformers": transformers_cases,
    "timm": timm_cases,
}


# -- running -----------------------------------------------------------------------


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the main thread after some seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _cause(error: BaseException) -> str:
    """Return an error in one line, with the place where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


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
    done = _names_in(args.out) if args.out else set()
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


def _names_in(path: Path) -> set[str]:
    """Return the names of the cases that a results file holds."""
    if not path.exists():
        return set()
    return {json.loads(line)["name"] for line in path.read_text().splitlines()}


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

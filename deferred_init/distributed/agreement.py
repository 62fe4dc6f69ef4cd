"""Ranks that share a model make the same plan.

Everything that would let values differ between ranks is compared before anything is
changed; disagreement is raised on every rank, with all values and who has which.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import is_sharded
from deferred_init.distributed.members import meeting_for
from deferred_init.distributed.rendezvous import (
    Meeting,
    RanksFailed,
    RanksMissing,
    by_answer,
    spell_who,
)
from deferred_init.errors import PlanError
from deferred_init.handlers.checkpoint import CheckpointInitializer
from deferred_init.handlers.protocol import Request
from deferred_init.handlers.replays import recorded_value
from deferred_init.plan import Plan
from deferred_init.record.provenance import provenance
from deferred_init.rng import BY_NAME
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.te.rng_trackers import tracker_digest

__all__ = ["agreed"]

_REGISTERED = (SlotKind.PARAMETER, SlotKind.BUFFER)
_MAX_SHOWN = 10
_MAX_OPERATIONS = 3
_THEN = "; "


def agreed(
    inventory: Inventory, request: Request, make: Callable[[], Plan], call: str
) -> Plan:
    """Make a plan and compare it with those of the other ranks.

    Args:
        inventory: This rank's model.
        request: This rank's arguments.
        make: Makes the plan.
        call: What is called, for the message.

    Raises:
        PlanError: The ranks disagree, one of them has no plan, or one did not come
            in time; raised on all ranks.
    """
    meeting = meeting_for(inventory, request, call)
    if meeting is None:
        return make()
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        try:
            plan = make()
        except Exception as error:  # noqa: BLE001 - raised below, when all know of it
            failure = error
        lists = _lists(inventory, request, plan)
        facts = _facts(request, plan, lists)
    except BaseException as error:
        meeting.fail(f"{type(error).__name__}: {error}")
        raise
    if failure is not None:
        facts["failure"] = f"{type(failure).__name__}: {failure}"
    problems = _compare(meeting, facts, lists)
    if failure is not None:
        raise failure
    if problems:
        raise PlanError(
            "the ranks disagree; nothing was changed:\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            problems,
        )
    assert plan is not None
    return plan


def _facts(
    request: Request, plan: Plan | None, lists: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return what has to be equal everywhere, by the name that a message gives it."""
    te = sys.modules.get("transformer_engine")
    facts = {
        "torch": torch.__version__,
        "Transformer Engine": str(getattr(te, "__version__", None)),
        "rng": request.rng,
        "seed": str(request.seed),
        "device": request.device.type,
        "dtype": str(request.dtype),
        "recipe": _named_digest(request.recipe),
        "verify": request.verify,
        "broadcast_from": str(request.broadcast_from),
    }
    made = plan is not None and any(
        not isinstance(step.initializer, CheckpointInitializer) for step in plan.steps
    )
    if made and request.broadcast_from is None:
        facts["kind of device"] = _kind_of_device(request.device)
    draws = plan is not None and plan.steps and request.rng == "eager"
    if draws and request.seed is None and request.broadcast_from is None:
        facts["state of the random generator"] = _generator_digest(request.device)
    if draws and plan is not None and request.broadcast_from is None:
        trackers = tracker_digest(step.site.module for step in plan.steps)
        if trackers is not None:
            facts["state of the random generators' tracker"] = trackers
    for name, lines in lists.items():
        facts[name] = _digest("\n".join(f"{k} {v}" for k, v in lines.items()))
    return facts


def _lists(
    inventory: Inventory, request: Request, plan: Plan | None
) -> dict[str, dict[str, str]]:
    """Return what is long: compared as a whole first, line by line if it differs."""
    if request.rng in BY_NAME:  # each rank may have a part of its own
        return {}
    lists = {"model": _structure(inventory, request)}
    if request.broadcast_from is None and plan is not None:
        lists["order"] = {
            f"step {step.index + 1}": f"{step.site.fqn or '(root)'} by "
            f"{step.claim.source or step.initializer.name}"
            for step in plan.steps
        }
        lists["operations"] = _operations(plan)
    return lists


def _operations(plan: Plan) -> dict[str, str]:
    """Spell what recorded tensors come from of which each rank keeps a part."""
    found = {
        slot.fqn: value
        for step in plan.steps
        if not isinstance(step.initializer, CheckpointInitializer)
        for slot in step.claim.slots
        if is_sharded(slot.tensor) and (value := recorded_value(slot)) is not None
    }
    return dict(zip(found, provenance(found.values()), strict=True))


def _compare(
    meeting: Meeting, facts: dict[str, str], lists: Mapping[str, dict[str, str]]
) -> list[str]:
    """Compare the facts; if a list differs, meet again to learn in which lines."""
    try:
        problems, differing = meeting.decide(facts, _judge_facts)
        if differing is not None:
            lines = lists.get(differing, {})
            problems = [*problems, *meeting.decide(lines, _judge_lines)]
    except (RanksFailed, RanksMissing) as error:
        return [str(error)]
    return problems


def _judge_facts(answers: Mapping[int, Any]) -> tuple[list[str], str | None]:
    failed = {
        rank: facts["failure"] for rank, facts in answers.items() if "failure" in facts
    }
    problems = [
        f"there is no plan on {spell_who(ranks)}: {text}"
        for text, ranks in by_answer(failed).items()
    ]
    differing: str | None = None
    for name in dict.fromkeys(key for facts in answers.values() for key in facts):
        values = {rank: facts[name] for rank, facts in answers.items() if name in facts}
        groups = by_answer(values)
        if name == "failure" or len(groups) < 2:
            continue
        if name in ("model", "order", "operations"):
            # Which lines is told by the first that differs; the others follow.
            differing = differing or name
        else:
            shown = ", ".join(f"{v} on {spell_who(r)}" for v, r in groups.items())
            problems.append(f"{name}: {shown}")
    if differing != "model" and problems:  # a consequence of what was found already
        differing = None
    return problems, differing


def _judge_lines(answers: Mapping[int, Any]) -> list[str]:
    """Name the lines in which the ranks differ: tensors, or steps."""
    names = dict.fromkeys(name for lines in answers.values() for name in lines)
    problems = []
    for name in names:
        values = {rank: lines.get(name, "absent") for rank, lines in answers.items()}
        groups = by_answer(values)
        if len(groups) > 1:
            shared = set.intersection(*(set(each.split(_THEN)) for each in groups))
            shown = ", ".join(
                f"{_without(v, shared)} on {spell_who(r)}" for v, r in groups.items()
            )
            problems.append(f"`{name}`: {shown}")
    if any(" real" in problem and " deferred" in problem for problem in problems):
        problems.append(
            "a model that is real on one rank only is handed to the others with "
            "`broadcast_from=<that rank>`, before it is sharded"
        )
    if len(problems) > _MAX_SHOWN + 1:
        hidden = len(problems) - _MAX_SHOWN
        problems = [*problems[: _MAX_SHOWN - 1], f"... and {hidden} more", problems[-1]]
    return problems


def _without(text: str, shared: set[str]) -> str:
    """Leave out operations that all ranks have, and those behind the first others."""
    own = [each for each in text.split(_THEN) if each not in shared]
    more = f"{_THEN}... and {len(own) - _MAX_OPERATIONS} more"
    few = _THEN.join(own[:_MAX_OPERATIONS]) or "no operation of its own"
    return few + (more if len(own) > _MAX_OPERATIONS else "")


def _structure(inventory: Inventory, request: Request) -> dict[str, str]:
    """Describe every parameter and buffer, by name."""
    return {
        slot.fqn: _describe(slot, request)
        for slot in inventory.slots
        if slot.kind in _REGISTERED
    }


def _describe(slot: Slot, request: Request) -> str:
    tensor: Tensor = slot.tensor
    parts = [f"{slot.kind.value} {list(tensor.size())} {tensor.dtype}"]
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        parts.append(f"sharded {[str(placement) for placement in placements]}")
    if tensor.requires_grad:
        parts.append("trained")
    if request.broadcast_from is None:
        parts.append("deferred" if slot.deferred else "real")
    return " ".join(parts)


def _named_digest(recipe: Any) -> str:
    if recipe is None:
        return "None"
    return f"{getattr(recipe, 'name', 'recipe')} ({_digest(repr(recipe))})"


def _generator_digest(device: torch.device) -> str:
    state = torch.random.get_rng_state()
    if device.type not in ("cpu", "meta"):
        state = torch.get_device_module(device).get_rng_state(device)
    return _digest(state.numpy().tobytes())


def _kind_of_device(device: torch.device) -> str:
    """Name what the bits of random numbers depend on, besides the generator.

    On a CPU that is the instruction set (ATen's vectorized kernels draw and round
    otherwise), on a GPU the number of threads that a kernel is spread over.
    """
    if device.type != "cuda" or not torch.cuda.is_available():  # planned elsewhere
        return torch.backends.cpu.get_cpu_capability()
    found = torch.cuda.get_device_properties(device)
    threads = found.max_threads_per_multi_processor
    return (
        f"sm_{found.major}{found.minor} with {found.multi_processor_count} "
        f"multiprocessors of {threads} threads"
    )


def _digest(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(raw).hexdigest()[:12]

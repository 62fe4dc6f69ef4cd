"""The three verbs: `materialize`, `plan`, `audit`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deferred_init.audit import run_audit, take_snapshot
from deferred_init.distributed.agreement import agreed, finish_together
from deferred_init.distributed.broadcast import hand_over, receiving_plan
from deferred_init.errors import AuditError
from deferred_init.execute import Execution, all_or_nothing, run_steps
from deferred_init.handlers.checkpoint import CheckpointInitializer
from deferred_init.handlers.protocol import Request
from deferred_init.handlers.registry import load_handlers, refreshers
from deferred_init.holders import check_holders, fill_optimizer_state, rebind_holders
from deferred_init.inventory import take_inventory
from deferred_init.loading.matching import WeightsRequest
from deferred_init.outlook import make_outlook
from deferred_init.plan import Plan
from deferred_init.planner import make_plan
from deferred_init.progress import progress_bar
from deferred_init.report import Report, ReportStep
from deferred_init.rng import ByName, Eager, GeneratorSnapshot, seed_all
from deferred_init.slots import Inventory
from deferred_init.sources.layout import LayoutRule
from deferred_init.validate import (
    as_models,
    as_optimizers,
    make_request,
    make_weights,
    wrapper_problems,
)
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["audit", "materialize", "plan"]

Models = nn.Module | Sequence[nn.Module]
Names = Mapping[str, str] | Iterable[Mapping[str, str] | LayoutRule]


def materialize(
    model: Models,
    device: torch.device | str | int,
    recipe: object = None,
    *,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    holders: Iterable[Any] = (),
    seed: int | None = None,
    rng: str = "eager",
    verify: str = "fast",
    strict: bool = True,
    progress: bool | None = None,
    dtype: torch.dtype | None = None,
    weights: object = None,
    names: Names = (),
    missing: str = "init",
    unexpected: str = "ignore",
    values_from: str | None = None,
    broadcast_from: int | None = None,
    rank_timeout_s: float = 300.0,
) -> Report:
    """Give memory and values to everything in a model that has none, and prove it.

    Every Parameter and buffer stays the same Python object, with new contents, so
    that optimizers, ties, fusers and your own variables are right without being
    told. Ties, views, `requires_grad`, Python attributes, hooks, dtypes, train/eval
    and buffer persistence survive. Tensors that have memory already are not touched.
    If anything fails, model, optimizers and generators are put back as they were.

    Args:
        model: A module built on the meta device or recorded by `deferred_init`, or
            several that belong together (pipeline stages; actor and critic that
            share weights).
        device: Where the tensors shall be: `"cpu"`, `"cuda"`, `"cuda:1"`.
        recipe: Numeric format: the name of a preset, a path, a `Recipe`, or a
            Transformer Engine recipe object. None keeps what the model says.
        optimizers: Optimizers built on the deferred parameters.
        holders: Anything else that holds parameters: EMA lists, dicts, functions
            with closures; checked by the audit, and rebound where a parameter could
            not keep its identity.
        seed: Seeds torch's generators of the CPU and of `device` first. None goes
            on with their current state, as a constructor would.
        rng: `"eager"` gives the values, and leaves the generator state, of eager
            construction on `device`; `"by_name"` seeds each tensor from `seed` and
            its qualified name, for subsets that must agree.
        verify: `"fast"` checks structure; `"full"` also poisons every allocation
            before it is filled and reads all values back.
        strict: Raise if the audit finds anything; otherwise only report it.
        progress: Show a progress bar; None shows one on a terminal when the work
            takes longer than a second.
        dtype: Cast floating-point parameters and buffers to this, as `model.to`
            would after eager construction.
        weights: Fill tensors from a checkpoint, after construction: a safetensors
            file, a folder or an index of them, a DCP folder, a `torch.save` file, a
            mapping, or what `deferred_init.sources.open_source` returns. Only
            deferred tensors are loaded; they keep the model's dtype.
        names: How the checkpoint's names differ: `{pattern: template}`, or a sequence
            of those and of `Fuse`, `Split`, `Stack`, `Unstack`.
        missing: What the checkpoint lacks: `"init"` initializes it as without
            weights, but refuses a checkpoint that lacks most of the model; `"any"`
            accepts that too; `"error"` refuses all.
        unexpected: What it has too much: `"ignore"` or `"error"`.
        values_from: `"cpu"` replays a recorded model on the CPU and moves each
            tensor over, for the values of eager construction on the CPU.
        broadcast_from: The rank whose values all others get, for models that are
            real on one rank only; before sharding. Every rank has to call this.
        rank_timeout_s: If the model is sharded, every rank that holds a part has to
            call this; how long they wait for each other.

    Returns:
        The report; `print(report)` shows it.

    Raises:
        PlanError: Something cannot be made; all of it is listed, nothing was done.
        MaterializeError: A step failed; everything is as it was.
        AuditError: The audit found something; carries the report.
        TypeError, ValueError: An argument is of the wrong kind.

    Example:
        >>> import torch, deferred_init as di
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 2)
        >>> weight = model.weight
        >>> report = di.materialize(model, "cpu", seed=0)
        >>> report.ok, model.weight is weight, weight.device.type
        (True, True, 'cpu')
    """
    started = time.perf_counter()
    models, opts, held = as_models(model), as_optimizers(optimizers), tuple(holders)
    request = make_request(
        device,
        recipe,
        rng=rng,
        verify=verify,
        dtype=dtype,
        seed=seed,
        values_from=values_from,
        broadcast_from=broadcast_from,
        rank_timeout_s=rank_timeout_s,
    )
    wanted = make_weights(weights, names, missing, unexpected)
    inventory = _look(models)
    the_plan = _plan(inventory, request, opts, wanted)
    before = take_snapshot(models, optimizers=opts, holders=held)
    planned = time.perf_counter()
    execution, workspace = _execute(the_plan, opts, held, progress)
    executed = time.perf_counter()
    findings = run_audit(
        models,
        optimizers=opts,
        holders=held,
        verify=verify,
        expected=before,
        device=request.device,
        dtypes=_castable_to(request),
        dtype_forced=request.dtype is not None,
        rebound=(*_rebound(the_plan, workspace), *workspace.dropped),
    )
    seconds = {
        "plan": planned - started,
        "execute": executed - planned,
        "audit": time.perf_counter() - executed,
    }
    report = _report(the_plan, execution, workspace, findings, seconds)
    if strict and not report.ok:
        raise AuditError(str(report), report)
    return report


def plan(
    model: Models,
    device: torch.device | str | int,
    recipe: object = None,
    *,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    seed: int | None = None,
    rng: str = "eager",
    verify: str = "fast",
    dtype: torch.dtype | None = None,
    weights: object = None,
    names: Names = (),
    missing: str = "init",
    unexpected: str = "ignore",
    gpu: str | None = None,
    world_size: int = 1,
) -> Plan:
    """Say what `materialize` would do, without doing any of it.

    Takes the arguments of `materialize` and needs no device: a plan for `"cuda"`
    can be made on a machine without a GPU. Reads the model, changes nothing.
    If the model is sharded, every rank that holds a part has to call this.

    Args:
        model: As in `materialize`, and so are the other arguments but these two.
        device: Where the tensors would be.
        recipe: Numeric format.
        optimizers: Optimizers built on the deferred parameters.
        seed: As in `materialize`.
        rng: As in `materialize`.
        verify: As in `materialize`.
        dtype: As in `materialize`.
        weights: As in `materialize`.
        names: As in `materialize`.
        missing: As in `materialize`.
        unexpected: As in `materialize`.
        gpu: What to plan for, by name: `"a100"`, `"l40s"`, `"h100"`, `"h200"` or
            `"b200"`. What that GPU cannot run is refused, and `plan.forecast().fits`
            says whether the model fits in its memory.
        world_size: Over how many ranks FSDP2 will shard the parameters: a number, no
            processes are needed.

    Returns:
        The plan: steps, bytes, predicted peak; `print(plan)` shows it, and
        `plan.forecast()` has bytes per tensor and rank.

    Raises:
        PlanError: As `materialize` would; also for what the GPU or FSDP2 refuse.
        ValueError: An unknown GPU, or a world size below 1.

    Example:
        >>> import torch, deferred_init as di
        >>> di.plan(torch.nn.Linear(4, 2, device="meta"), "cuda").final_bytes
        40
    """
    request = make_request(
        device,
        recipe,
        rng=rng,
        verify=verify,
        dtype=dtype,
        seed=seed,
        must_exist=False,
    )
    outlook = make_outlook(request, gpu, world_size)
    wanted = make_weights(weights, names, missing, unexpected)
    inventory = _look(as_models(model))
    the_plan = _plan(
        inventory,
        outlook.request,
        as_optimizers(optimizers),
        wanted,
        outlook.problems(inventory),
    )
    notes = (*the_plan.notes, *outlook.notes(the_plan.steps))
    return replace(the_plan, gpu=outlook.gpu, world_size=world_size, notes=notes)


def audit(
    model: Models,
    *,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    holders: Iterable[Any] = (),
    verify: str = "fast",
) -> Report:
    """Prove that a model is ready to train, or say what is wrong with it.

    Looks at the whole object graph and changes nothing; works on any model,
    materialized by this package or not. With `verify="full"` the ranks that share a
    sharded model compare checksums, and each of them has to call this.

    Returns:
        A report whose `findings` are empty if all is well; never raises for them.

    Example:
        >>> import torch, deferred_init as di
        >>> di.audit(torch.nn.Linear(4, 2)).ok
        True
    """
    models, opts = as_models(model), as_optimizers(optimizers)
    load_handlers()
    started = time.perf_counter()
    findings = run_audit(models, optimizers=opts, holders=tuple(holders), verify=verify)
    seconds = {"audit": time.perf_counter() - started}
    return Report(findings=tuple(findings), seconds=seconds)


def _look(models: tuple[nn.Module, ...]) -> Inventory:
    load_handlers()
    return take_inventory(models)


def _plan(
    inventory: Inventory,
    request: Request,
    optimizers: tuple[Optimizer, ...],
    wanted: WeightsRequest | None,
    problems: Sequence[str] = (),
) -> Plan:
    before = [
        *problems,
        *wrapper_problems(inventory),
        *check_holders(inventory, optimizers),
    ]
    weights = None
    if wanted is not None:
        weights = CheckpointInitializer(inventory, request, wanted)

    def make() -> Plan:
        return make_plan(inventory, request, before, weights)

    return agreed(inventory, request, lambda: receiving_plan(inventory, request, make))


def _execute(
    the_plan: Plan,
    optimizers: tuple[Optimizer, ...],
    holders: tuple[Any, ...],
    progress: bool | None,
) -> tuple[Execution, ExecutionWorkspace]:
    """Run the plan, then rebind; all of it or nothing."""
    request = the_plan.request
    generators = GeneratorSnapshot(request.device)
    workspace = ExecutionWorkspace(the_plan.inventory, request)
    with (
        all_or_nothing(workspace, generators),
        finish_together(the_plan.inventory, request),
        progress_bar(the_plan, progress) as on_step,
    ):
        execution = run_steps(the_plan, workspace, _policy(the_plan), on_step)
        if request.rng == "by_name" or not request.draws_unneeded:
            generators.restore()
        hand_over(the_plan, workspace.current)
        for text in fill_optimizer_state(optimizers, workspace.on_undo):
            workspace.note(f"made {text}")
        for refresher in refreshers():
            refresher.refresh(the_plan.inventory, holders, workspace)
        for place in rebind_holders(
            workspace.replaced, optimizers, holders, workspace.on_undo
        ):
            workspace.note(f"rebound {place}")
    return execution, workspace


def _policy(the_plan: Plan) -> Eager | ByName:
    """Return the RNG policy; an eager one begins with the seed."""
    request = the_plan.request
    if request.rng == "by_name":
        assert request.seed is not None, "checked by make_request"
        return ByName(request.seed, request.device)
    if request.seed is not None and the_plan.steps:
        seed_all(request.seed, request.device)
    return Eager()


def _rebound(the_plan: Plan, workspace: ExecutionWorkspace) -> tuple[str, ...]:
    """Names of the tensors that could not stay the same objects."""
    return tuple(
        slot.fqn
        for slot in the_plan.inventory.slots
        if id(slot.tensor) in workspace.replaced
    )


def _castable_to(request: Request) -> tuple[torch.dtype, ...]:
    """The dtypes that the request gives to floating-point tensors."""
    if request.dtype is not None:
        return (request.dtype,)
    if request.recipe is None:
        return ()
    policy = request.recipe.dtype
    chosen = (policy.parameter, policy.norm, policy.buffer)
    return tuple(dtype for dtype in chosen if dtype is not None)


def _report(
    the_plan: Plan,
    execution: Execution,
    workspace: ExecutionWorkspace,
    findings: Sequence[Any],
    seconds: dict[str, float],
) -> Report:
    return Report(
        findings=tuple(findings),
        seconds=seconds,
        device=str(the_plan.request.device),
        recipe=getattr(the_plan.request.recipe, "name", None),
        rng=the_plan.request.rng,
        notes=(*the_plan.notes, *workspace.notes),
        assumptions=the_plan.assumptions,
        rebound=_rebound(the_plan, workspace),
        steps=tuple(
            ReportStep(
                fqn=step.site.fqn,
                module_class=type(step.site.module).__name__,
                initializer=step.initializer.name,
                source=step.claim.source,
                num_tensors=len(step.claim.slots),
                num_bytes=step.num_bytes,
                seconds=execution.seconds.get(step.index, 0.0),
            )
            for step in the_plan.steps
        ),
        final_bytes=the_plan.final_bytes,
        peak_bytes=execution.peak_bytes,
        predicted_peak_bytes=the_plan.peak_bytes,
    )

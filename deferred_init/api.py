"""The verbs `materialize` and `plan`; `audit` is in `audit_verb.py`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from deferred_init.audit import run_audit, take_snapshot
from deferred_init.distributed.outcome import failures_told
from deferred_init.errors import AuditError
from deferred_init.garbage import full_collections_wait, young_collections_wait
from deferred_init.model_arguments import Models, as_models
from deferred_init.one_at_a_time import one_at_a_time
from deferred_init.outlook import make_outlook
from deferred_init.pipeline import look, make_agreed_plan, run_plan
from deferred_init.plan import Plan
from deferred_init.report import Finding, Report
from deferred_init.sources.layout import LayoutRule
from deferred_init.summary import dtypes_asked_for, rebound_names, summarize
from deferred_init.validate import (
    as_optimizers,
    make_request,
    make_weights,
)
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["materialize", "plan"]

Names = Mapping[str, str] | Iterable[Mapping[str, str] | LayoutRule]


@one_at_a_time
@full_collections_wait()
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
            its qualified name, for subsets that must agree; `"fast"` does the same
            with a generator of our own, at the speed of a GPU's memory.
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
            of those and of `deferred_init.sources.Fuse`, `Split`, `Stack`, `Unstack`
            and `Transpose`.
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
    models = as_models(model)
    with failures_told(models, "`materialize`", broadcast_from):
        opts, held = as_optimizers(optimizers), tuple(holders)
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
        inventory = look(models)
    the_plan = make_agreed_plan(inventory, request, opts, wanted)
    with (
        failures_told(models, "`materialize`", broadcast_from),
        young_collections_wait(),
    ):
        before = take_snapshot(models, optimizers=opts, holders=held)
    planned = time.perf_counter()
    seconds = {"plan": planned - started}

    @young_collections_wait()
    def prove(workspace: ExecutionWorkspace) -> list[Finding]:
        seconds["execute"] = time.perf_counter() - planned
        return run_audit(
            models,
            optimizers=opts,
            holders=held,
            verify=verify,
            expected=before,
            device=request.device,
            dtypes=dtypes_asked_for(request),
            dtype_forced=request.dtype is not None,
            rebound=(*rebound_names(the_plan, workspace), *workspace.dropped),
        )

    execution, workspace, findings = run_plan(the_plan, opts, held, progress, prove)
    seconds["audit"] = time.perf_counter() - planned - seconds["execute"]
    report = summarize(the_plan, execution, workspace, findings, seconds)
    if strict and not report.ok:
        raise AuditError(str(report), report)
    return report


@one_at_a_time
@full_collections_wait()
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
    models = as_models(model)
    with failures_told(models, "`plan`"):
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
        opts = as_optimizers(optimizers)
        inventory = look(models)
    the_plan = make_agreed_plan(
        inventory,
        outlook.request,
        opts,
        wanted,
        lambda: outlook.problems(inventory),
        call="`plan`",
    )
    notes = (*the_plan.notes, *outlook.notes(the_plan.steps))
    the_plan = replace(the_plan, gpu=outlook.gpu, world_size=world_size, notes=notes)
    return replace(the_plan, counted=the_plan.forecast())

"""Puts the report of a materialization together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deferred_init.execute import Execution
from deferred_init.forecast import representation_of
from deferred_init.handlers.protocol import Request, Step
from deferred_init.plan import Plan
from deferred_init.report import Report, ReportStep
from deferred_init.representation import Representation
from deferred_init.slots import Slot
from deferred_init.target_dtype import final_dtype
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["dtypes_asked_for", "rebound_names", "summarize"]


def rebound_names(the_plan: Plan, workspace: ExecutionWorkspace) -> tuple[str, ...]:
    """Names of the tensors that could not stay the same objects."""
    if not workspace.replaced:
        return ()
    return tuple(
        slot.fqn
        for slot in the_plan.inventory.slots
        if slot.tensor_id in workspace.replaced
    )


def dtypes_asked_for(request: Request) -> tuple[torch.dtype, ...]:
    """The dtypes that the request gives to floating-point tensors."""
    if request.dtype is not None:
        return (request.dtype,)
    if request.recipe is None:
        return ()
    policy = request.recipe.dtype
    chosen = (policy.parameter, policy.norm, policy.buffer)
    return tuple(dtype for dtype in chosen if dtype is not None)


def summarize(
    the_plan: Plan,
    execution: Execution,
    workspace: ExecutionWorkspace,
    findings: Sequence[Any],
    seconds: dict[str, float],
) -> Report:
    """Put what was planned, done and found into a report."""
    return Report(
        findings=tuple(findings),
        seconds=seconds,
        device=str(the_plan.request.device),
        recipe=getattr(the_plan.request.recipe, "name", None),
        rng=the_plan.request.rng,
        notes=(*the_plan.notes, *workspace.notes),
        assumptions=the_plan.assumptions,
        rebound=rebound_names(the_plan, workspace),
        steps=tuple(
            ReportStep.of(
                step,
                seconds=execution.seconds.get(step.index, 0.0),
                bytes_by_format=_bytes_by_format(step, the_plan.request),
            )
            for step in the_plan.steps
        ),
        final_bytes=the_plan.final_bytes,
        peak_bytes=execution.peak_bytes,
        predicted_peak_bytes=the_plan.peak_bytes,
    )


def _bytes_by_format(step: Step, request: Request) -> dict[str, int]:
    """Divide the bytes of a step by dtype, or by recipe where stored quantized."""
    sizes: dict[str, int] = {}
    left = step.num_bytes
    for slot in step.claim.slots:
        stored = representation_of(slot, step.claim)
        dtype = final_dtype(slot, request)
        name = str(dtype).removeprefix("torch.") if stored is None else stored.te_recipe
        # Bytes of a shared storage are counted with its first tensor only.
        size = min(_rough_bytes(slot, stored, dtype, request), left)
        sizes[name] = sizes.get(name, 0) + size
        left -= size
    if left and sizes:
        sizes[next(iter(sizes))] += left
    return sizes


def _rough_bytes(
    slot: Slot, stored: Representation | None, dtype: torch.dtype, request: Request
) -> int:
    """Bytes of a tensor of any type, which may be real by now."""
    tensor = getattr(slot.tensor, "_local_tensor", slot.tensor)
    known = None
    if stored is not None:
        known = stored.num_bytes(tensor.shape, request.compute_capability)
    if known is not None:
        return known
    return int(tensor.numel()) * dtype.itemsize

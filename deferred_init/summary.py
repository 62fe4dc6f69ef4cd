"""Puts the report of a materialization together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deferred_init.execute import Execution
from deferred_init.forecast import bytes_by_format
from deferred_init.handlers.protocol import Request
from deferred_init.plan import Plan
from deferred_init.report import Report, ReportStep
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["dtypes_asked_for", "rebound_names", "summarize"]


def rebound_names(the_plan: Plan, workspace: ExecutionWorkspace) -> tuple[str, ...]:
    """Names of the tensors that could not stay the same objects."""
    return tuple(
        slot.fqn
        for slot in the_plan.inventory.slots
        if id(slot.tensor) in workspace.replaced
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
            ReportStep(
                fqn=step.site.fqn,
                module_class=type(step.site.module).__name__,
                initializer=step.initializer.name,
                source=step.claim.source,
                num_tensors=len(step.claim.slots),
                num_bytes=step.num_bytes,
                seconds=execution.seconds.get(step.index, 0.0),
                bytes_by_format=bytes_by_format(step, the_plan.request),
            )
            for step in the_plan.steps
        ),
        final_bytes=the_plan.final_bytes,
        peak_bytes=execution.peak_bytes,
        predicted_peak_bytes=the_plan.peak_bytes,
    )

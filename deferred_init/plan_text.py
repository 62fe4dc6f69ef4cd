"""The plan as plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deferred_init.forecast import Forecast, PlannedTensor
from deferred_init.report import ReportStep
from deferred_init.report_text import bytes_text, step_table, wrapped

if TYPE_CHECKING:
    from deferred_init.plan import Plan

__all__ = ["plan_text"]

_MAX_LINES = 20


def plan_text(plan: Plan) -> str:
    """Return totals, the peak and its reason, formats, and a row per kind of step."""
    found = plan.forecast()
    lines = [
        f"Plan: {len(found.tensors)} tensors, {plan.final_bytes:,} bytes on "
        f"{plan.request.device}, peak {found.peak_bytes:,} bytes, "
        f"rng={plan.request.rng}"
    ]
    lines += wrapped(f"peak: {found.peak_reason}", "  ")
    if plan.world_size > 1:
        lines += wrapped(
            f"each of {plan.world_size} ranks keeps {found.rank_bytes:,} bytes "
            f"({bytes_text(found.rank_bytes)})",
            "  ",
        )
    if plan.gpu is not None:
        lines += wrapped(_fit_text(found), "  ")
    lines += [f"  {line}" for line in _formats(found)]
    lines += _rows(plan)
    for title, texts in (("assumed", plan.assumptions), ("notes", plan.notes)):
        if texts:
            lines.append(f"  {title}:")
            for text in texts[:_MAX_LINES]:
                lines += wrapped(text, "    - ")
            if len(texts) > _MAX_LINES:
                lines.append(f"    ... and {len(texts) - _MAX_LINES} more {title}")
    return "\n".join(lines)


def _fit_text(found: Forecast) -> str:
    assert found.gpu is not None
    gpu = found.gpu
    part = 100 * found.peak_bytes / gpu.memory_bytes
    verdict = "fits" if found.fits else "DOES NOT FIT"
    return (
        f"{verdict}: the peak is {part:.1f} % of the {bytes_text(gpu.memory_bytes)} of "
        f"one {gpu.name.upper()} (the model alone, without gradients, optimizer or "
        "activations)"
    )


def _formats(found: Forecast) -> Iterator[str]:
    """Yield one line for each way in which tensors are stored."""
    groups: dict[tuple[str, str], list[PlannedTensor]] = {}
    for tensor in found.tensors:
        groups.setdefault((tensor.dtype, tensor.stored_as), []).append(tensor)
    for (dtype, stored_as), tensors in groups.items():
        size = bytes_text(sum(tensor.num_bytes for tensor in tensors))
        how = "" if stored_as == "dense" else f" stored as {stored_as}"
        yield f"{len(tensors):>6} tensors of {dtype}{how}: {size}"


def _rows(plan: Plan) -> list[str]:
    steps = [ReportStep.of(step) for step in plan.steps]
    return list(step_table(steps, timed=False))

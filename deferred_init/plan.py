"""The plan: pure data about what will be made, by whom, in which order.

Making one (`planner.py`) touches no storage and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deferred_init.handlers.protocol import Request, Step
from deferred_init.slots import Inventory, Slot, SlotKind

__all__ = ["Plan", "final_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What `materialize` would do.

    Attributes:
        request: Device, recipe, dtype and policies.
        inventory: The slots that it was made from.
        steps: The work, in order.
        notes: Remarks for the report.
        assumptions: What had to be assumed about values or order.
        final_bytes: Bytes of everything that will be made.
        scratch_bytes: The largest extra need of any single step.
    """

    request: Request
    inventory: Inventory
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    final_bytes: int
    scratch_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device: final size plus the largest scratch."""
        return self.final_bytes + self.scratch_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data."""
        return {
            "device": str(self.request.device),
            "rng": self.request.rng,
            "final_bytes": self.final_bytes,
            "peak_bytes": self.peak_bytes,
            "steps": [
                {
                    "fqn": step.site.fqn,
                    "class": type(step.site.module).__name__,
                    "initializer": step.initializer.name,
                    "source": step.claim.source,
                    "makes": [slot.fqn for slot in step.claim.slots],
                    "rewrites": len(step.claim.rewrites),
                    "bytes": step.num_bytes,
                    "scratch_bytes": step.claim.scratch_bytes,
                }
                for step in self.steps
            ],
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
        }

    def __str__(self) -> str:
        """Return a table of at most 100 columns."""
        head = (
            f"Plan: {sum(len(s.claim.slots) for s in self.steps)} tensors, "
            f"{self.final_bytes:,} bytes on {self.request.device}, "
            f"peak {self.peak_bytes:,} bytes, rng={self.request.rng}"
        )
        rows = [_row(step) for step in self.steps]
        return "\n".join([head, *rows])


def _row(step: Step) -> str:
    kind = type(step.site.module).__name__
    source = step.claim.source or step.initializer.name
    return (
        f"{step.site.fqn or '(root)':<40.40} {kind:<18.18} "
        f"{len(step.claim.slots):>4} {step.num_bytes:>14,}  {source:.19}"
    )


def final_dtype(slot: Slot, request: Request) -> torch.dtype:
    """The dtype that a slot's tensor ends with: its own, or what was asked for.

    `dtype=` of the call wins over the recipe, and only floating-point tensors
    ever change.
    """
    own = slot.tensor.dtype
    if not own.is_floating_point or slot.tensor.element_size() == 1:
        return own
    if request.dtype is not None:
        return request.dtype
    if request.recipe is None:
        return own
    target = request.recipe.dtype.target(
        own,
        is_buffer=slot.kind is not SlotKind.PARAMETER,
        in_norm="norm" in type(slot.owner).__name__.lower(),
    )
    assert isinstance(target, torch.dtype)
    return target

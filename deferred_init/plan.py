"""The plan: pure data about what will be made, by whom, in which order.

Making one (`planner.py`) touches no storage and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deferred_init.forecast import Forecast, forecast
from deferred_init.handlers.protocol import Request, Step
from deferred_init.hardware import Hardware
from deferred_init.plan_text import plan_text
from deferred_init.slots import Inventory

__all__ = ["Plan"]


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
        scratch_bytes: What the peak needs on top of the final size.
        gpu: The hardware that it was made for by name, or None.
        world_size: Over how many ranks parameters are to be sharded.
        counted: The forecast, once counted: `materialize` may change what it reads.
    """

    request: Request
    inventory: Inventory
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    final_bytes: int
    scratch_bytes: int
    gpu: Hardware | None = None
    world_size: int = 1
    counted: Forecast | None = None

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device.

        Intermediate results of a replay are left out, which takes longer to find:
        `forecast` counts them too.
        """
        return self.final_bytes + self.scratch_bytes

    def forecast(self) -> Forecast:
        """Count bytes per tensor, device and rank, and say what makes the peak."""
        if self.counted is not None:
            return self.counted
        return forecast(
            self.steps,
            self.inventory,
            self.request,
            world_size=self.world_size,
            gpu=self.gpu,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data."""
        return {
            "device": str(self.request.device),
            "recipe": getattr(self.request.recipe, "name", None),
            "rng": self.request.rng,
            "final_bytes": self.final_bytes,
            **self.forecast().to_dict(),
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
        return plan_text(self)

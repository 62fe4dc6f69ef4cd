"""Hands the values of a model that is real on one rank only to all the others.

For models loaded on one rank (`broadcast_from=0`), before they are sharded: what is
deferred on a rank gets memory there and receives what the source has in its place.
What the source lacks itself is made there by its own plan first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deferred_init.distributed.agreement import meeting_for
from deferred_init.errors import MaterializeError, PlanError, listing
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.plan import Plan, final_dtype
from deferred_init.slots import Inventory, ModuleSite, Slot

__all__ = ["hand_over", "receiving_plan"]


class _Receiver:
    """Gives memory to tensors whose values come from another rank."""

    composite = False

    def __init__(self, source: int) -> None:
        self.name = f"broadcast from rank {source}"

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Never asked; `receiving_plan` makes the claims."""
        return None

    def run(self, step: Step, workspace: Workspace) -> None:
        """Allocate; `hand_over` fills."""
        workspace.allocate(step.claim.slots)


def receiving_plan(
    inventory: Inventory, request: Request, make: Callable[[], Plan]
) -> Plan:
    """Make a plan, or on ranks that receive everything one that only allocates.

    Args:
        inventory: This rank's model.
        request: This rank's arguments.
        make: Makes the ordinary plan.

    Raises:
        PlanError: The model is sharded already.
    """
    source = request.broadcast_from
    if source is None:
        return make()
    sharded = [s.fqn for s in inventory.slots if hasattr(s.tensor, "device_mesh")]
    if sharded:
        raise PlanError(
            f"{len(sharded)} tensors are sharded already: {listing(sharded)}. A rank "
            "that held all values has kept its own shard only; call "
            f"materialize(model, broadcast_from={source}) first, then shard"
        )
    if dist.get_rank() == source:
        return make()
    receiver = _Receiver(source)
    steps: list[Step] = []
    seen: set[int] = set()
    for site in inventory.sites():
        slots = [s for s in site.slots if s.deferred and id(s.tensor) not in seen]
        if not slots:
            continue
        seen.update(id(slot.tensor) for slot in slots)
        claim = Claim(slots=tuple(slots), source=receiver.name)
        num_bytes = sum(
            slot.tensor.numel() * final_dtype(slot, request).itemsize for slot in slots
        )
        steps.append(
            Step(
                index=len(steps),
                site=site,
                initializer=receiver,
                claim=claim,
                num_bytes=num_bytes,
            )
        )
    return Plan(
        request=request,
        inventory=inventory,
        steps=tuple(steps),
        notes=(),
        assumptions=(),
        final_bytes=sum(step.num_bytes for step in steps),
        scratch_bytes=0,
    )


def hand_over(plan: Plan, current: Callable[[Tensor], Tensor]) -> None:
    """Send from the source what was deferred on any rank; one broadcast per tensor.

    Args:
        plan: This rank's plan, after its steps were run.
        current: Returns the object that stands for a tensor of the inventory now.

    Raises:
        MaterializeError: A rank lacks a tensor that another one needs.
    """
    request = plan.request
    meeting = meeting_for(plan.inventory, request)
    if request.broadcast_from is None or meeting is None:
        return
    slots = {slot.fqn: slot for slot in plan.inventory.slots}
    made = [slot.fqn for step in plan.steps for slot in step.claim.slots]
    needed = [] if dist.get_rank() == request.broadcast_from else made
    names, problems = meeting.decide((list(slots), needed), _needed)
    if problems:
        raise MaterializeError("; ".join(problems))
    needed_set = set(needed)
    for name in names:
        slot = slots[name]
        _broadcast(current(slot.tensor), slot, request, wanted=name in needed_set)


def _needed(answers: Mapping[int, Any]) -> tuple[list[str], list[str]]:
    """Return the names that somebody needs, and who does not know them."""
    needed = dict.fromkeys(name for _, wants in answers.values() for name in wants)
    problems = []
    for rank, (names, _) in answers.items():
        absent = sorted(set(needed) - set(names))
        if absent:
            problems.append(
                f"rank {rank} does not have {listing(absent)}, which is deferred on "
                "another rank"
            )
    return list(needed), problems


def _broadcast(tensor: Tensor, slot: Slot, request: Request, *, wanted: bool) -> None:
    source = request.broadcast_from
    assert source is not None
    mine = dist.get_rank() == source
    # As bytes, because no backend knows all dtypes.
    if mine:
        data = tensor.detach().to(request.device, final_dtype(slot, request))
        flat = data.contiguous().reshape(-1)
    else:
        flat = torch.empty(
            tensor.numel(), dtype=final_dtype(slot, request), device=request.device
        )
    if flat.numel():
        dist.broadcast(flat.view(torch.uint8), src=source)
    if wanted:
        with torch.no_grad():
            tensor.detach().copy_(flat.view(tensor.size()))

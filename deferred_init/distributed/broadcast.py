"""Hands the values of a model that is real on one rank only to all the others.

For models loaded on one rank (`broadcast_from=0`), before they are sharded: what is
deferred on a rank gets memory there and receives what the source has in its place.
What the source lacks itself is made there by its own plan first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deferred_init.aliases import is_sharded
from deferred_init.distributed.members import meeting_for
from deferred_init.errors import MaterializeError, PlanError, listing
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.plan import Plan
from deferred_init.slots import Inventory, ModuleSite, Slot
from deferred_init.target_dtype import final_bytes, final_dtype

__all__ = ["hand_over", "receiving_plan"]

_PARCEL_BYTES = 256 << 20
_ALIGNED_BYTES = 16  # the largest element, complex128


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
    sharded = [s.fqn for s in inventory.slots if is_sharded(s.tensor)]
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
        slots = [s for s in site.slots if s.deferred and s.tensor_id not in seen]
        if not slots:
            continue
        seen.update(slot.tensor_id for slot in slots)
        claim = Claim(slots=tuple(slots), source=receiver.name)
        num_bytes = sum(final_bytes(slot, request) for slot in slots)
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
    """Send from the source what was deferred on any rank, in parcels of some MB.

    [Note: Parcels]
    Problem: a rank that fails between two collectives (it has no memory for the next
    tensor, or is interrupted) leaves the others in a collective that it never enters,
    until the process group's own time-out ends, and leaves the group out of step.

    Design: what can fail is done before or after a collective, never between two. Each
    rank packs a parcel (the source copies values into it, the others only allocate),
    then the ranks meet, and only if all of them have theirs it is sent as one
    collective. Whoever fails comes to the next meeting and says so; nobody is in a
    collective then.

    Args:
        plan: This rank's plan, after its steps were run.
        current: Returns the object that stands for a tensor of the inventory now.

    Raises:
        MaterializeError: A rank lacks a tensor that another one needs, or has it in
            another size.
        RanksFailed: Another rank failed.
        RanksMissing: Another rank did not come in time.
    """
    request = plan.request
    meeting = meeting_for(plan.inventory, request, "the broadcast of `materialize`")
    if request.broadcast_from is None or meeting is None:
        return
    slots = {slot.fqn: slot for slot in plan.inventory.slots}
    made = [slot.fqn for step in plan.steps for slot in step.claim.slots]
    mine = dist.get_rank() == request.broadcast_from
    needed = [] if mine else made
    sizes = {name: final_bytes(slot, request) for name, slot in slots.items()}
    names, problems = meeting.decide((sizes, needed), _needed)
    if problems:
        raise MaterializeError("; ".join(problems))
    wanted = set(needed)
    for parcel in _parcels(names, sizes):
        values = {name: current(slots[name].tensor) for name in parcel}
        buffer, parts = _pack(parcel, slots, request)
        if mine:
            for name, part in parts.items():
                part.copy_(values[name].detach().to(request.device, part.dtype))
        meeting.decide(None, _packed)
        _send(buffer, request.broadcast_from)
        with torch.no_grad():
            for name in wanted.intersection(parcel):
                values[name].detach().copy_(parts[name])


def _needed(answers: Mapping[int, Any]) -> tuple[list[str], list[str]]:
    """Return the names that somebody needs, and who does not know them."""
    needed = dict.fromkeys(name for _, wants in answers.values() for name in wants)
    problems = []
    for rank, (sizes, _) in answers.items():
        absent = sorted(set(needed) - set(sizes))
        if absent:
            problems.append(
                f"rank {rank} does not have {listing(absent)}, which is deferred on "
                "another rank"
            )
    for name in needed if not problems else ():
        found = {rank: sizes[name] for rank, (sizes, _) in answers.items()}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{n} bytes on rank {rank}" for rank, n in found.items())
            problems.append(f"`{name}` has {shown}; build the same model on all ranks")
    return list(needed), problems


def _parcels(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in parcels of `_PARCEL_BYTES`, or of one larger tensor."""
    parcel: list[str] = []
    num_bytes = 0
    for name in names:
        if parcel and num_bytes + sizes[name] > _PARCEL_BYTES:
            yield parcel
            parcel, num_bytes = [], 0
        parcel.append(name)
        num_bytes += sizes[name]
    if num_bytes:
        yield parcel


def _pack(
    parcel: Iterable[str], slots: Mapping[str, Slot], request: Request
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return memory for a parcel, as bytes, because no backend knows all dtypes.

    Returns:
        The bytes, and for each name a view of them in its dtype and shape.
    """
    begins: dict[str, int] = {}
    end = 0
    for name in parcel:
        begins[name] = end
        end += -(-final_bytes(slots[name], request) // _ALIGNED_BYTES) * _ALIGNED_BYTES
    buffer = torch.empty(end, dtype=torch.uint8, device=request.device)
    parts = {}
    for name, begin in begins.items():
        slot = slots[name]
        num_bytes = final_bytes(slot, request)
        flat = buffer[begin : begin + num_bytes].view(final_dtype(slot, request))
        parts[name] = flat.view(slot.tensor.size())
    return buffer, parts


def _packed(answers: Mapping[int, Any]) -> None:
    """Judge nothing: whoever could not pack has said so."""


def _send(buffer: Tensor, source: int) -> None:
    """Run the collective; an interrupt waits until it has ended."""
    try:
        work = dist.broadcast(buffer, src=source, async_op=True)
    except KeyboardInterrupt:  # the others are in it already
        dist.broadcast(buffer, src=source)
        raise
    try:
        work.wait()
    except KeyboardInterrupt:
        work.wait()
        raise

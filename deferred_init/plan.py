"""The plan: pure data about what will be made, by whom, in which order.

Making a plan touches no storage and changes nothing. All claims are collected and
all problems found before a single one is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import StorageGroup
from deferred_init.errors import PlanError, listing
from deferred_init.handlers.protocol import Claim, Initializer, Request, Step
from deferred_init.handlers.registry import allocator_for, initializers_for
from deferred_init.rebind import swap_obstacle
from deferred_init.slots import Inventory, ModuleSite, Slot, SlotKind

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What `materialize` would do.

    Attributes:
        request: Device, recipe, dtype and policies.
        inventory: The slots that it was made from.
        steps: The work, in order.
        notes: Remarks for the report.
        assumptions: What had to be assumed about values or order.
        unswappable: Tensors that cannot keep their identity, and why.
        final_bytes: Bytes of everything that will be made.
        scratch_bytes: The largest extra need of any single step.
    """

    request: Request
    inventory: Inventory
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    unswappable: tuple[tuple[Slot, str], ...]
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
            "rebound": [slot.fqn for slot, _ in self.unswappable],
        }

    def __str__(self) -> str:
        """Return a table of at most 100 columns."""
        head = (
            f"Plan: {sum(len(s.claim.slots) for s in self.steps)} tensors, "
            f"{self.final_bytes:,} bytes on {self.request.device}, "
            f"peak {self.peak_bytes:,} bytes, rng={self.request.rng}"
        )
        rows = [
            f"{step.site.fqn or '(root)':<40.40} {type(step.site.module).__name__:<18.18}"
            f" {len(step.claim.slots):>4} {step.num_bytes:>14,}  "
            f"{step.claim.source or step.initializer.name:<.20}"
            for step in self.steps
        ]
        return "\n".join([head, *rows])


def make_plan(
    inventory: Inventory, request: Request, known_problems: Sequence[str] = ()
) -> Plan:
    """Collect the claims of all initializers.

    Args:
        inventory: What there is.
        request: What is asked for.
        known_problems: Found by earlier checks; reported together with the rest.

    Raises:
        PlanError: If anything is unclaimed or impossible; lists all of it.
    """
    claims = _Claims(inventory, request)
    needed = _sites_with_deferred(inventory)
    for site in inventory.sites():
        if id(site) in needed:
            claims.ask(site)
    problems = [*known_problems, *claims.problems]
    problems += _unclaimed(inventory, claims.claimed)
    problems += _unallocatable(inventory, request)
    if request.rng == "by_name":
        problems += _name_collisions(inventory)
    if problems:
        raise PlanError(_message(problems), problems)
    steps = _ordered_steps(claims.found, request)
    return Plan(
        request=request,
        inventory=inventory,
        steps=steps,
        notes=(),
        assumptions=tuple(
            dict.fromkeys(text for step in steps for text in step.claim.assumptions)
        ),
        unswappable=_unswappable(inventory),
        final_bytes=sum(step.num_bytes for step in steps),
        scratch_bytes=max((step.claim.scratch_bytes for step in steps), default=0),
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


class _Claims:
    """Claims collected so far."""

    def __init__(self, inventory: Inventory, request: Request) -> None:
        self.found: list[tuple[ModuleSite, Initializer, Claim]] = []
        self.problems: list[str] = []
        self.claimed: set[int] = set()
        self._inventory = inventory
        self._request = request

    def ask(self, site: ModuleSite) -> None:
        """Ask the initializers of one module's type, most specific first."""
        pending = self._pending(site)
        for initializer in initializers_for(type(site.module)):
            if not pending and not initializer.composite:
                continue
            claim = initializer.claim(site, pending, self._request)
            if claim is None:
                continue
            self.problems.extend(claim.problems)
            claim = self._normalize(claim)
            self.claimed.update(id(slot.tensor) for slot in claim.slots)
            if not claim.problems:
                self.found.append((site, initializer, claim))
            pending = self._pending(site)

    def _normalize(self, claim: Claim) -> Claim:
        """Turn claims of what others make already into rewrites."""
        fresh: dict[int, Slot] = {}
        again: dict[int, Slot] = {}
        for slot in claim.slots:
            target = again if id(slot.tensor) in self.claimed else fresh
            target.setdefault(id(slot.tensor), slot)
        for slot in claim.rewrites:
            if id(slot.tensor) not in fresh:
                again.setdefault(id(slot.tensor), slot)
        return replace(
            claim, slots=tuple(fresh.values()), rewrites=tuple(again.values())
        )

    def _pending(self, site: ModuleSite) -> tuple[Slot, ...]:
        unique: dict[int, Slot] = {}
        for slot in site.slots:
            if slot.deferred and id(slot.tensor) not in self.claimed:
                unique.setdefault(id(slot.tensor), slot)
        return tuple(unique.values())


def _sites_with_deferred(inventory: Inventory) -> set[int]:
    """Sites that own something deferred, or have a descendant that does."""
    needed: set[int] = set()
    for site in inventory.sites():
        if any(slot.deferred for slot in site.slots) or any(
            id(child) in needed for child in site.children
        ):
            needed.add(id(site))
    return needed


def _unclaimed(inventory: Inventory, claimed: set[int]) -> list[str]:
    left = [slot for slot in inventory.deferred if id(slot.tensor) not in claimed]
    # A later composite step may have claimed a tensor through another slot.
    if not left:
        return []
    owners = dict.fromkeys(type(slot.owner).__name__ for slot in left)
    carried = any(slot.kind is SlotKind.TENSOR_ATTRIBUTE for slot in left)
    described = [slot.describe()[1:].replace("`", "", 1) for slot in left]
    names = ", ".join(f"`{name.split(' ', 1)[0]}` {name.split(' ', 1)[1]}"
                      for name in described[:10])
    more = f", ... and {len(left) - 10} more" if len(left) > 10 else ""
    extra = (
        " Tensors that a Parameter carries are attached after `materialize`."
        if carried
        else ""
    )
    verb = "tensor has" if len(left) == 1 else "tensors have"
    return [
        f"{len(left)} {verb} no initializer: {names}{more}. Build the model inside "
        f"`deferred_init(...)`, register an initializer for {listing(list(owners))}, "
        f"or load real values into them before.{extra}"
    ]


def _unallocatable(inventory: Inventory, request: Request) -> list[str]:
    problems = []
    for slot in inventory.deferred:
        allocator = allocator_for(slot.tensor)
        if allocator is None:
            problems.append(
                f"{slot.describe()} is a `{type(slot.tensor).__name__}`, a tensor "
                "subclass that no allocator claims: materialize the model before "
                "its parameters are converted, or build it inside `deferred_init`"
            )
        elif (reason := allocator.problem(slot.tensor, request)) is not None:
            problems.append(f"{slot.describe()} {reason}")
    return problems


def _name_collisions(inventory: Inventory) -> list[str]:
    from deferred_init.rng import canonical_name

    names: dict[str, int] = {}
    clashes: list[str] = []
    for slot in inventory.deferred:
        name = canonical_name(slot.fqn)
        if names.setdefault(name, id(slot.tensor)) != id(slot.tensor):
            clashes.append(name)
    if not clashes:
        return []
    return [
        f"{len(clashes)} names stand for two different tensors each under "
        f'rng="by_name", which would give both the same values: {listing(clashes)}. '
        "Materialize these models one by one with different seeds"
    ]


def _unswappable(inventory: Inventory) -> tuple[tuple[Slot, str], ...]:
    found = []
    for slot in inventory.deferred:
        group = inventory.groups[id(slot.tensor)]
        views = views_within(group, slot.tensor)
        reason = swap_obstacle(slot.tensor, known_views=views)
        if reason is not None:
            found.append((slot, reason))
    return tuple(found)


def views_within(group: StorageGroup, tensor: Tensor) -> int:
    """How many members of a group are autograd views of this member."""
    if len(group.members) == 1:
        return 0
    return sum(
        member is not tensor and member._is_view() and member._base is tensor
        for member in group.members
    )


def _ordered_steps(
    found: Sequence[tuple[ModuleSite, Initializer, Claim]], request: Request
) -> tuple[Step, ...]:
    """Put claims that know their order into it, after those that do not."""
    ordered = sorted(
        enumerate(found), key=lambda item: (item[1][2].order or 0, item[0])
    )
    return tuple(
        Step(
            index=index,
            site=site,
            initializer=initializer,
            claim=claim,
            num_bytes=sum(_slot_bytes(slot, request) for slot in claim.slots),
        )
        for index, (_, (site, initializer, claim)) in enumerate(ordered)
    )


def _slot_bytes(slot: Slot, request: Request) -> int:
    allocator = allocator_for(slot.tensor)
    assert allocator is not None, "checked by _unallocatable"
    return allocator.num_bytes(slot.tensor, final_dtype(slot, request))


def _message(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    shown = "\n".join(f"  - {problem}" for problem in problems[:10])
    more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"{len(problems)} problems; nothing was changed:\n{shown}{more}"

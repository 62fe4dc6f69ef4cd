"""Puts claims into the order of construction."""

from __future__ import annotations

from collections.abc import Sequence

from deferred_init.forecast import new_bytes
from deferred_init.handlers.protocol import Claim, Initializer, Order, Request, Step
from deferred_init.handlers.registry import construction_order
from deferred_init.slots import Inventory, ModuleSite

__all__ = ["ordered_steps"]

_WALK_ORDER: Order = (2**61, 0)


def ordered_steps(
    found: Sequence[tuple[ModuleSite, Initializer, Claim]],
    inventory: Inventory,
    request: Request,
) -> tuple[Step, ...]:
    """Put claims that know their order into it, before those that do not."""
    placed = [
        (claim.order or construction_order(site.module), site, initializer, claim)
        for site, initializer, claim in found
    ]
    placed.sort(key=lambda item: item[0] or _WALK_ORDER)  # equal ones stay in order
    counted: set[int] = set()
    return tuple(
        [
            Step(
                index=index,
                site=site,
                initializer=initializer,
                claim=claim,
                num_bytes=new_bytes(claim, inventory, request, counted),
                order=order,
            )
            for index, (order, site, initializer, claim) in enumerate(placed)
        ]
    )

"""Says where the order of construction cannot be read off a module tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Step
from deferred_init.slots import Inventory, ModuleSite

__all__ = ["list_assumptions", "order_assumptions"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


def list_assumptions(steps: Sequence[Step], inventory: Inventory) -> tuple[str, ...]:
    """Name classes with several lists of modules, which one loop may have filled.

    A block that appends to plain lists in turn, and registers them as a `ModuleList`
    each at the end, leaves the same tree as one that fills list after list.
    """
    drawn = {
        id(step.site)
        for step in steps
        if step.order is None and step.initializer.name == "torch.nn"
    }
    found: dict[str, list[str]] = {}
    for site in inventory.sites():
        lists = [one for one in site.children if isinstance(one.module, _LISTS)]
        kind = type(site.module)
        known = kind.__module__.startswith("torch.nn.") or kind.__qualname__ in found
        if len(lists) > 1 and not known:
            names = [one.fqn.rpartition(".")[2] for one in lists if _any(one, drawn)]
            if len(names) > 1:
                found[kind.__qualname__] = names
    return tuple(
        f"the modules in {listing(names)} of {kind} were constructed list after list; "
        "where one loop constructed them in turn, build the model inside "
        "`deferred_init(...)`"
        for kind, names in found.items()
    )


def _any(site: ModuleSite, sites: set[int]) -> bool:
    return any(id(below) in sites for below in site.post_order())


def order_assumptions(steps: Sequence[Step]) -> tuple[str, ...]:
    """Name modules whose place among the others had to be assumed.

    `vars(module)` keeps the order of plain attributes and `_modules` that of the
    registered ones, but nothing keeps the order between the two.
    """
    unplaced = [step.site for step in steps if step.order is None]
    outside = [site.fqn for site in unplaced if not site.registered]
    if not outside or len(outside) == len(unplaced):
        return ()
    return (
        f"{listing(list(dict.fromkeys(outside)))}, which no module has registered, "
        "were constructed after the registered modules of the same owner",
    )

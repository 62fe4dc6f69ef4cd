"""Says where the order of construction cannot be read off a module tree."""

from __future__ import annotations

from collections.abc import Sequence

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Step

__all__ = ["order_assumptions"]


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

"""Lends tensors in full size that all have memory from the first to the last moment.

For steps of which everything fits into the budget and nothing was kept before, which
are most: nobody has to watch what init code uses. See `staging.py` for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import Tensor

from deferred_init.slots import Slot
from deferred_init.staged_loan import Loan

__all__ = ["HotLoans"]

# Of the loan itself, and of the call that counts.
_OWN_REFERENCES = 2


class HotLoans:
    """The loans of one step, each with memory.

    Args:
        keep: Called with a home and its full value, to keep the part.
        prepare: Called with fresh memory, to poison it; None to leave it alone.
    """

    def __init__(
        self,
        keep: Callable[[Tensor, Tensor], None],
        prepare: Callable[[Tensor], None] | None,
    ) -> None:
        self._keep = keep
        self._prepare = prepare
        self._loans: dict[int, Loan] = {}
        self._lent: list[tuple[Slot, Tensor]] = []

    def lend(self, loan: Loan, slots: tuple[Slot, ...]) -> None:
        """Put scratch into every place that holds a tensor."""
        loan.lend(hot=True)
        scratch = loan.scratch
        self._loans[id(scratch)] = loan
        if self._prepare is not None:
            self._prepare(scratch.detach())
        for slot in slots:
            slot.write(scratch)
            self._lent.append((slot, loan.home))

    def __enter__(self) -> HotLoans:
        """Do nothing: everything is lent."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing; nothing is kept or given back yet."""

    def lacks_memory(self, tensor: Tensor) -> bool:
        """Return False: everything is lent with memory."""
        return False

    def keep_all(self) -> None:
        """Keep the parts."""
        for loan in self._loans.values():
            if loan.keeps:
                self._keep(loan.home, loan.scratch)

    def give_back(self) -> None:
        """Put the homes back into their places, with attributes that were set."""
        for slot, home in self._lent:
            slot.write(home)
        for loan in self._loans.values():
            if loan.keeps and loan.scratch.__dict__:
                loan.home.__dict__.update(loan.scratch.__dict__)
            if sys.getrefcount(loan.scratch) > _OWN_REFERENCES:
                loan.cool()  # init code kept it, and shall not keep its memory

    def loan_of(self, tensor: Tensor) -> Loan | None:
        """Return the loan that a tensor object is the scratch of."""
        return self._loans.get(id(tensor))

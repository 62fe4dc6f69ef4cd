"""Staging: lends init code a tensor of full size where only a part of it stays.

[Note: Full-size values under a memory budget]
Problem: a rank keeps a slice of a DTensor, but the init code has to see the whole: its
shape decides the scale, and a draw for a slice is not a slice of the draw. One init
function may write a whole model (`nn.Transformer` does), and all of it in full size
is what sharding was to avoid.

Naive attempt: give every tensor of the step memory in full size, slice at the end.

Design: what is lent is *cold*: right shape, dtype and device, one element of memory.
A function mode sees every use. Before the first use of its data a tensor is made *hot*:
it gets memory of full size. When that would exceed the budget (the largest tensor of
the plan), others are made cold again: the rank's slice is kept, the memory is freed.
A view that somebody still holds of a hot tensor keeps it hot. Where all of a step fits
into the budget and nothing was kept before, which is so for most modules, everything is
made hot at once and nobody watches (`hot_loans.py`): that is the same, and costs less.

A value that was kept before is *absent* from the memory of its tensor when that is made
hot again. A dispatch mode watches: an operation that overwrites all of it, as most
init functions begin, makes the value present; before any other operation that touches
the memory the value is gathered from the shards.

Gathering is communication, and needs all ranks of the mesh to do the same; they do,
since all run the same plan, unless one has failed. So they meet before (see
`distributed/rendezvous.py`), where one that failed says so.

Shortcomings: such a meeting costs about as much as the gathering. Memory that is
reached without torch (`data_ptr`, `numpy`) is watched up to the call that hands it
out, not beyond.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from deferred_init.aliases import storage_key
from deferred_init.fast.window import Window
from deferred_init.handlers.protocol import StagedAllocator, Step, is_staged
from deferred_init.handlers.registry import allocator_for
from deferred_init.slots import Inventory, Slot
from deferred_init.staged_loan import Fill, Loan, lenders
from deferred_init.staging_modes import PROMISED, Contents, Uses

__all__ = ["Staging", "keeps_nothing", "largest_staged_bytes"]
__all__ += ["staged_allocator"]


class Staging:
    """The loans of one step; a context in which they become hot when they are used.

    Args:
        budget_bytes: How much of it may be in use before loans are made cold.
        keep: Called with a home and its full value, to keep the part.
        prepare: Called with fresh memory, to poison it; None to leave it alone.
        fulfil: Called with a home and what was promised, to fill the part; False if
            the whole is needed for that. None takes no promises.
        before_gather: Called before a value is gathered from all ranks; raises if one
            of them is not going to come.
    """

    def __init__(
        self,
        budget_bytes: int,
        keep: Callable[[Tensor, Tensor], None],
        prepare: Callable[[Tensor], None] | None = None,
        fulfil: Callable[[Tensor, Fill], bool] | None = None,
        before_gather: Callable[[], None] | None = None,
    ) -> None:
        self._fulfil = fulfil
        self._before_gather = before_gather
        self._budget_bytes = budget_bytes
        self._keep = keep
        self._prepare = prepare
        self._loans: dict[int, Loan] = {}
        self._hot: OrderedDict[int, Loan] = OrderedDict()
        self._absent: dict[int, Loan] = {}
        self._lent: list[tuple[Slot, Tensor]] = []
        self._modes = ExitStack()

    def lend(self, loan: Loan, slots: tuple[Slot, ...]) -> None:
        """Put scratch into every place that holds a tensor."""
        loan.lend(hot=False)
        self._loans[id(loan.scratch)] = loan
        for slot in slots:
            slot.write(loan.scratch)
            self._lent.append((slot, loan.home))

    def __enter__(self) -> Staging:
        """Begin to watch what is used."""
        passing = PROMISED if self._fulfil else frozenset()
        self._modes.enter_context(Uses(self._use, passing))
        if any(loan.stored for loan in self._loans.values()):
            self._modes.enter_context(Contents(self._absent, self._touch))
        if self._fulfil:
            lenders.append(self)
            self._modes.callback(lenders.remove, self)
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop watching; nothing is kept or given back yet."""
        self._modes.close()

    def keep_all(self) -> None:
        """Keep the parts of everything that is still hot, or promised."""
        for loan in self._loans.values():
            if loan.promised and loan.keeps:
                assert self._fulfil is not None, "else nothing is promised"
                if not self._fulfil(loan.home, loan.promised):
                    self.warm(loan)
        for key in list(self._hot):
            self._cool(key)

    def give_back(self) -> None:
        """Put the homes back into their places, with attributes that were set."""
        for slot, home in self._lent:
            slot.write(home)
        for loan in self._loans.values():
            if loan.keeps:
                loan.home.__dict__.update(loan.scratch.__dict__)

    def loan_of(self, tensor: Tensor) -> Loan | None:
        """Return the loan that a tensor object is the scratch of."""
        return self._loans.get(id(tensor))

    def lacks_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor was made from one that had no memory at that time.

        `nn.Parameter(lent)` is such a case, which no mode sees.
        """
        return any(loan.stood_in(tensor) for loan in self._loans.values())

    def cold_loan(self, tensor: Tensor) -> Loan | None:
        """Return the loan without memory that a tensor is the scratch of."""
        loan = self._loans.get(id(tensor))
        return None if loan is None or loan.hot else loan

    def warm(self, loan: Loan) -> Tensor:
        """Give a loan memory, and return it."""
        self._use([loan.scratch], False)
        return loan.scratch.detach()

    def _use(self, tensors: list[Tensor], replaced: bool) -> None:
        """Make those of the tensors hot that are lent.

        Args:
            tensors: What an operation uses.
            replaced: Whether it puts other memory in the place of the first one's.
        """
        keys = [id(tensor) for tensor in tensors if id(tensor) in self._loans]
        for key in keys:
            loan = self._loans[key]
            if loan.hot:
                self._hot.move_to_end(key)
                continue
            self._make_room(loan.full_bytes, keys)
            loan.heat()
            if self._prepare is not None:
                self._prepare(loan.scratch.detach())
            self._hot[key] = loan
            if loan.promised:
                write, loan.promised = loan.promised, None
                write(loan.scratch.detach(), Window.of_whole(loan.scratch.numel()))
            elif loan.stored:
                self._absent[_key(loan.scratch)] = loan
        if replaced:
            self._absent.pop(_key(tensors[0]), None)

    def _touch(self, written: Tensor | None, others: list[Tensor]) -> None:
        """Make values present that an operation needs.

        Args:
            written: The tensor that it overwrites completely, if any.
            others: Every other tensor that it reads or writes.
        """
        for tensor in others:
            loan = self._absent.pop(_key(tensor), None)
            if loan is not None:
                self._load(loan)
        if written is not None:
            loan = self._absent.pop(_key(written), None)
            if loan is not None and written.numel() != loan.scratch.numel():
                self._load(loan)

    def _load(self, loan: Loan) -> None:
        if self._before_gather:
            self._before_gather()
        loan.load()

    def _make_room(self, size: int, used: list[int]) -> None:
        for key, loan in list(self._hot.items()):
            in_use = sum(each.full_bytes for each in self._hot.values())
            if in_use + size <= self._budget_bytes:
                return
            if key not in used and not loan.held_elsewhere():
                self._cool(key)

    def _cool(self, key: int) -> None:
        loan = self._hot.pop(key)
        absent = self._absent.pop(_key(loan.scratch), None)
        if loan.keeps and absent is None:
            self._keep(loan.home, loan.scratch)
            loan.stored = True
        loan.cool()


def _key(tensor: Tensor) -> int:
    return storage_key(tensor) or 0


def largest_staged_bytes(inventory: Inventory) -> int:
    """Bytes of the largest tensor that is made in full size and kept in part."""
    return max(
        (
            allocator.full_bytes(slot.tensor)
            for slot in inventory.deferred
            if (allocator := staged_allocator(slot.tensor)) is not None
        ),
        default=0,
    )


def staged_allocator(tensor: Tensor) -> StagedAllocator | None:
    """Return the allocator of a tensor of which only a part stays here, or None."""
    allocator = allocator_for(tensor)
    return allocator if is_staged(allocator) else None


def keeps_nothing(step: Step) -> bool:
    """Whether no part of what a step makes stays in this process.

    False for steps that may have to gather what was made before, since the other
    processes would wait for this one.
    """
    made = {slot.tensor_id for slot in step.claim.slots}
    own = step.site.slots
    if not made or step.claim.rewrites or any(s.tensor_id not in made for s in own):
        return False
    return all(
        (allocator := staged_allocator(slot.tensor)) is not None
        and allocator.num_bytes(slot.tensor, slot.tensor.dtype) == 0
        for slot in step.claim.slots
    )

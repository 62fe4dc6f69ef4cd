"""What init code is lent for the time of one step, and how it is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deferred_init.aliases import is_recorded
from deferred_init.handlers.plain import dress
from deferred_init.handlers.protocol import Step
from deferred_init.handlers.registry import allocator_for
from deferred_init.hot_loans import HotLoans
from deferred_init.rebind import take_over
from deferred_init.record.paused import no_function_modes
from deferred_init.slots import Slot, SlotKind
from deferred_init.staged_loan import Loan
from deferred_init.staging import Staging, staged_allocator

if TYPE_CHECKING:
    from deferred_init.workspace import ExecutionWorkspace

__all__ = ["Loans"]


class Loans:
    """Context in which a step's tensors have memory, and others are out of reach.

    A class and not a generator: it is entered for every module of a model.

    Args:
        workspace: Allocates, keeps and adopts.
        step: What is claimed gets memory, or is lent in full size.
        scratch: Whether all other tensors of the module (of all modules below too, if
            the step rewrites what others made) are replaced by scratch.
    """

    def __init__(
        self, workspace: ExecutionWorkspace, step: Step, *, scratch: bool
    ) -> None:
        self._workspace = workspace
        self._step = step
        self._scratch = scratch
        self._lent: list[tuple[Slot, Tensor]] = []
        self._staging: Staging | HotLoans | None = None

    def __enter__(self) -> None:
        """Give memory, and lend."""
        try:
            with no_function_modes():
                claimed = self._step.claim.slots
                others = self._others() if self._scratch else ()
                self._lend_scratch(others)
                dense = [s for s in claimed if staged_allocator(s.tensor) is None]
                if dense:
                    self._workspace.allocate(dense)
                if len(dense) < len(claimed) or others or self._step.claim.rewrites:
                    self._lend_staged(others)
            if self._staging is not None:
                self._staging.__enter__()
        except BaseException:
            if self._staging is not None:
                self._staging.__exit__()
            self._give_back()
            raise

    def __exit__(self, kind: object, *_error: object) -> None:
        """Keep what was made, unless the body failed, and take everything back."""
        try:
            if self._staging is not None:
                self._staging.__exit__()
            if kind is None:
                with no_function_modes():
                    if self._staging is not None:
                        self._staging.keep_all()
                    self._collect_replacements()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._staging is not None:
            self._staging.give_back()
        for slot, original in self._lent:
            slot.write(original)

    def _others(self) -> Sequence[Slot]:
        """The slots whose tensors the body may write and must not."""
        site, claim = self._step.site, self._step.claim
        if not claim.rewrites:
            return () if claim.slots == site.slots else site.slots
        return [slot for one in site.post_order() for slot in one.slots]

    def _lend_scratch(self, slots: Sequence[Slot]) -> None:
        """Replace what must not be written by scratch, for the time of one step."""
        workspace, step = self._workspace, self._step
        writable = {s.tensor_id for s in (*step.claim.slots, *step.claim.rewrites)}
        for slot in slots:
            key = slot.tensor_id
            if key in writable or slot.kind not in _REGISTERED:
                continue
            made = key in workspace.made
            if made and slot.owner is not step.site.module:
                continue
            original = workspace.current(slot.tensor)
            if staged_allocator(original) is not None:
                continue
            device = workspace.request.device
            slot.write(_scratch_like(original, device, copy=not made))
            self._lent.append((slot, original))

    def _lend_staged(self, others: Sequence[Slot]) -> None:
        """Lend tensors of full size for those of which only a part stays here."""
        workspace, claim = self._workspace, self._step.claim
        claimed = {slot.tensor_id: slot for slot in (*claim.slots, *claim.rewrites)}
        wanted = claimed
        if others:
            wanted = {slot.tensor_id: slot for slot in others} | claimed
        loans: list[tuple[Loan, tuple[Slot, ...]]] = []
        for key, slot in wanted.items():
            home = workspace.current(slot.tensor)
            allocator = staged_allocator(home)
            if allocator is None:
                continue
            made = key in workspace.made
            below = slot.owner is not self._step.site.module
            loan = Loan(
                home,
                allocator,
                workspace.request.device,
                keeps=key in claimed or (made and below),
                stored=made or not home.is_meta,
            )
            loans.append((loan, workspace.inventory.slots_of(slot.tensor)))
        if loans:
            staging = workspace.new_staging(self._step, [loan for loan, _ in loans])
            self._staging = staging
            for loan, slots in loans:
                staging.lend(loan, slots)

    def _collect_replacements(self) -> None:
        """Adopt tensors that the body put in place of the ones it was given."""
        workspace, staging = self._workspace, self._staging
        for slot in self._step.claim.slots:
            found = slot.read()
            home = workspace.current(slot.tensor)
            if staging is not None and staging.loan_of(found) is not None:
                if slot.tensor_id not in workspace.made:
                    workspace.allocate((slot,))  # init code may leave it as it is
            elif found is not home:
                if staging is not None and staging.lacks_memory(found):
                    raise RuntimeError(
                        f"`{slot.fqn}` was wrapped in a new Parameter while it was "
                        "lent without memory, as sharded ones are: fill the Parameter "
                        "that is there, or materialize the model before it is sharded"
                    )
                if not take_over(home, found, workspace.undo.push):
                    workspace.adopt(slot, found)
                slot.write(workspace.current(slot.tensor))


_REGISTERED = (SlotKind.PARAMETER, SlotKind.BUFFER)


def _scratch_like(tensor: Tensor, device: torch.device, *, copy: bool) -> Tensor:
    """Return memory of the same geometry; with the values where they were real."""
    if copy and not tensor.is_meta:
        return dress(tensor, tensor.detach().clone())
    allocator = allocator_for(tensor)
    if is_recorded(tensor) and allocator is not None:
        return allocator.empty_like(tensor, device)
    data = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
    )
    return dress(tensor, data)

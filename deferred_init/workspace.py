"""The workspace: the only code that changes a model, and that can undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from deferred_init.aliases import StorageGroup
from deferred_init.handlers.plain import dress
from deferred_init.handlers.protocol import Request, Step
from deferred_init.handlers.registry import allocator_for
from deferred_init.plan import final_dtype
from deferred_init.poison import fill_poison
from deferred_init.rebind import exchange
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.undo import ModuleSnapshot, UndoLog

__all__ = ["ExecutionWorkspace"]


class ExecutionWorkspace:
    """Allocates, adopts and undoes; implements the `Workspace` protocol.

    Attributes:
        undo: How to put everything back.
        replaced: Tensors that could not keep their identity: `id(old)` to
            `(old, new)`, with `old` kept alive so that the id stays its own.
        notes: Lines for the report.
    """

    def __init__(self, inventory: Inventory, request: Request) -> None:
        self._inventory = inventory
        self._request = request
        self._made: set[int] = set()
        self._snapshot = ModuleSnapshot(site.module for site in inventory.sites())
        self.undo = UndoLog()
        self.undo.push(self._snapshot.restore)
        self.replaced: dict[int, tuple[Tensor, Tensor]] = {}
        self.notes: list[str] = []

    @property
    def request(self) -> Request:
        """What the caller asked for."""
        return self._request

    def watch(self, module: nn.Module) -> None:
        """Remember the attributes of a module that the inventory does not know."""
        self._snapshot.add(module)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Register an action to run if a later step fails."""
        self.undo.push(action)

    def note(self, text: str) -> None:
        """Add a line to the report's notes."""
        self.notes.append(text)

    def current(self, tensor: Tensor) -> Tensor:
        """Return the object that stands for an inventory tensor now."""
        pair = self.replaced.get(id(tensor))
        return tensor if pair is None else pair[1]

    def allocate(self, slots: Sequence[Slot]) -> None:
        """Give memory to the tensors of the slots; their contents are undefined."""
        for slot in slots:
            if id(slot.tensor) in self._made:
                continue
            group = self._inventory.groups[id(slot.tensor)]
            if group.shared:
                self._allocate_shared(group)
            else:
                allocator = allocator_for(slot.tensor)
                assert allocator is not None, "checked in the plan"
                new = allocator.empty_like(slot.tensor, self._request.device)
                self._poison(new)
                self._install(slot.tensor, new)

    def adopt(self, slot: Slot, tensor: Tensor) -> None:
        """Give the tensor object of a slot the contents of a newly made one."""
        target = self.current(slot.tensor)
        if tensor is target:
            return
        tensor.requires_grad_(target.requires_grad) if tensor.is_leaf else None
        self._install(target, tensor)

    @contextmanager
    def filling(self, step: Step) -> Iterator[None]:
        """Let the body fill the step's tensors in place; see the protocol."""
        self.allocate(step.claim.slots)
        lent = self._lend_scratch(step)
        try:
            yield
            self._collect_replacements(step)
        finally:
            for slot, original in lent:
                slot.write(original)

    def finish(self, slot: Slot) -> None:
        """Cast a tensor to its final dtype once nobody writes it any more."""
        tensor = self.current(slot.tensor)
        dtype = final_dtype(slot, self._request)
        if tensor.dtype != dtype and allocator_for(tensor) is not None:
            tensor.data = tensor.data.to(dtype)

    def _install(self, old: Tensor, new: Tensor) -> None:
        """Exchange contents, or where that is impossible replace the object."""
        self._made.add(id(old))
        try:
            self.undo.push(exchange(old, new))
        except TypeError:  # the two classes have different layouts
            self._replace(old, new)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Put a new object into every slot that holds the old one."""
        new.__dict__.update(old.__dict__)
        _copy_hooks(old, new)
        for slot in self._inventory.slots_of(old):
            slot.write(new)
            self.undo.push(partial(slot.write, old))
        self.replaced[id(old)] = (old, new)
        self._made.add(id(new))

    def _poison(self, tensor: Tensor) -> None:
        if self._request.verify == "full":
            fill_poison(tensor)

    def _allocate_shared(self, group: StorageGroup) -> None:
        """Allocate one storage for all members and rebuild each on top of it.

        Bases come before views of them, so that autograd's view relation is
        rebuilt too.
        """
        members = sorted(group.members, key=lambda member: member._is_view())
        block = torch.empty(
            group.num_bytes, dtype=torch.uint8, device=self._request.device
        ).untyped_storage()
        made: dict[int, Tensor] = {}
        for member in members:
            base = made.get(id(member._base)) if member._is_view() else None
            geometry = (member.size(), member.stride(), member.storage_offset())
            if base is not None and base.dtype == member.dtype:
                with torch.set_grad_enabled(member.requires_grad):
                    made[id(member)] = base.as_strided(*geometry)
                continue
            data = torch.empty(0, dtype=member.dtype, device=self._request.device)
            data.set_(block, member.storage_offset(), member.size(), member.stride())
            self._poison(data)
            made[id(member)] = dress(member, data)
        for member in members:
            self._install(member, made[id(member)])

    def _lend_scratch(self, step: Step) -> list[tuple[Slot, Tensor]]:
        """Replace what must not be written by scratch, for the time of one step."""
        claim = step.claim
        writable = {id(slot.tensor) for slot in (*claim.slots, *claim.rewrites)}
        sites = step.site.post_order() if claim.rewrites else (step.site,)
        lent: list[tuple[Slot, Tensor]] = []
        for site in sites:
            for slot in site.slots:
                if slot.kind not in (SlotKind.PARAMETER, SlotKind.BUFFER):
                    continue
                if id(slot.tensor) in writable or (
                    site is not step.site and id(slot.tensor) in self._made
                ):
                    continue
                original = self.current(slot.tensor)
                made = id(slot.tensor) in self._made
                slot.write(_scratch_like(original, self._request.device, copy=not made))
                lent.append((slot, original))
        return lent

    def _collect_replacements(self, step: Step) -> None:
        """Adopt tensors that the body put in place of the ones it was given."""
        for slot in step.claim.slots:
            found = slot.read()
            if found is not self.current(slot.tensor):
                self.adopt(slot, found)
                slot.write(self.current(slot.tensor))


def _scratch_like(tensor: Tensor, device: torch.device, *, copy: bool) -> Tensor:
    """Return memory of the same geometry; with the values where they were real."""
    if copy and not tensor.is_meta:
        return dress(tensor, tensor.detach().clone())
    data = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
    )
    return dress(tensor, data)


def _copy_hooks(old: Tensor, new: Tensor) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)

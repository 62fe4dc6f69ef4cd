"""The workspace: the only code that changes a model, and that can undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from deferred_init.aliases import BARE_TYPES, StorageGroup
from deferred_init.distributed.fsdp2 import offload_devices
from deferred_init.distributed.outcome import all_still_there
from deferred_init.handlers.plain import dress
from deferred_init.handlers.protocol import Request, Step, is_staged
from deferred_init.handlers.registry import allocator_for
from deferred_init.hot_loans import HotLoans
from deferred_init.loans import Loans
from deferred_init.poison import fill_poison
from deferred_init.rebind import exchange
from deferred_init.record.paused import no_function_modes, without_own_mode
from deferred_init.rng import BY_NAME
from deferred_init.slots import Inventory, Slot
from deferred_init.staged_loan import Fill, Loan
from deferred_init.staging import Staging, largest_staged_bytes, staged_allocator
from deferred_init.target_dtype import final_dtype
from deferred_init.undo import ModuleSnapshot, UndoLog
from deferred_init.views import view_like, with_bits_of

__all__ = ["ExecutionWorkspace"]


class ExecutionWorkspace:
    """Allocates, adopts and undoes; implements the `Workspace` protocol.

    Attributes:
        undo: How to put everything back.
        replaced: Tensors that could not keep their identity: `id(old)` to
            `(old, new)`, with `old` kept alive so that the id stays its own.
        notes: Lines for the report.
        final_now: Tensors (by `id`) that no step after the present one writes. What
            is adopted for one of them is cast at once, so that a step which makes a
            whole model never holds it in two dtypes.
        dropped: Names of caches that were emptied on purpose.
    """

    def __init__(self, inventory: Inventory, request: Request) -> None:
        self.inventory = inventory
        self._request = request
        self._under_mode = request.rng in BY_NAME
        self._casts = request.dtype is not None or request.recipe is not None
        self.made: set[int] = set()
        modules = [site.module for site in inventory.sites()]
        self._offloaded = offload_devices(modules)
        self.largest_bytes = largest_staged_bytes(inventory)
        self._snapshot = ModuleSnapshot(modules)
        self.undo = UndoLog()
        self.undo.push(self._snapshot.restore)
        self.replaced: dict[int, tuple[Tensor, Tensor]] = {}
        # Else whoever keeps the error keeps its frames, and they the new tensors.
        self.undo.push(self.replaced.clear)
        self.notes: list[str] = []
        self.final_now: Set[int] = frozenset()
        self.dropped: list[str] = []

    @property
    def request(self) -> Request:
        """What the caller asked for."""
        return self._request

    def drop(self, fqn: str) -> None:
        """Say that what was cached under a name is gone on purpose."""
        self.dropped.append(fqn)

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
        pair = self.replaced.get(id(tensor)) if self.replaced else None
        return tensor if pair is None else pair[1]

    def allocate(self, slots: Sequence[Slot]) -> None:
        """Give memory to the tensors of the slots; their contents are undefined."""
        with no_function_modes():
            for slot in slots:
                if slot.tensor_id in self.made:
                    continue
                group = self.inventory.groups[slot.tensor_id]
                if group.shared:
                    self._allocate_shared(group)
                else:
                    new = self._empty_like(slot.tensor)
                    self.poison(new)
                    self._install(slot.tensor, new)

    def shares_memory(self, slot: Slot) -> bool:
        """Whether other tensors of the model lie in the memory of this one."""
        return self.inventory.groups[slot.tensor_id].shared

    def adopt(self, slot: Slot, tensor: Tensor) -> None:
        """Give the tensor object of a slot the contents of a newly made one."""
        target = self.current(slot.tensor)
        if tensor is target:
            return
        with no_function_modes():
            if staged_allocator(target) and not staged_allocator(tensor):
                self.keep(target, tensor)
                if type(tensor) in (Tensor, nn.Parameter):
                    # As in `exchange`, what init code set wins.
                    target.__dict__.update(tensor.__dict__)
                return
            if tensor.is_leaf:
                tensor.requires_grad_(target.requires_grad)
            self._install(target, tensor)
        if slot.tensor_id in self.final_now:
            self.finish((slot,))

    def rebind(self, slots: Sequence[Slot], tensor: Tensor) -> None:
        """Let whoever holds the tensors of the slots hold another one instead."""
        for slot in slots:
            old = self.current(slot.tensor)
            for place in self.inventory.slots_of(slot.tensor):
                if place.read() is old:
                    self.undo.push(partial(place.write, old))
                    place.write(tensor)
            self.replaced[slot.tensor_id] = (slot.tensor, tensor)
            self.made.update((slot.tensor_id, id(tensor)))

    def filling(self, step: Step) -> Loans:
        """Let the body fill the step's tensors in place; see the protocol."""
        return Loans(self, step, scratch=True)

    def whole(self, step: Step) -> Loans:
        """Let the body write the step's tensors, and nothing else, in full size."""
        return Loans(self, step, scratch=False)

    def new_staging(self, step: Step, loans: Sequence[Loan]) -> Staging | HotLoans:
        """Return what lends tensors in full size, within the budget."""
        prepare = self.poison if self._request.verify == "full" else None
        fast = self._request.rng == "fast"
        promises = fast and getattr(step.initializer, "only_uses_torch", False)
        stored = any(loan.stored for loan in loans)
        num_bytes = sum(loan.full_bytes for loan in loans)
        if not (promises or stored) and num_bytes <= self.largest_bytes:
            return HotLoans(self.keep, prepare)
        fulfil = self._fulfil if promises else None
        all_there = partial(all_still_there, self.inventory, self._request)
        return Staging(self.largest_bytes, self.keep, prepare, fulfil, all_there)

    def finish(self, slots: Iterable[Slot]) -> None:
        """Cast tensors to their final dtype once nobody writes them any more."""
        if not self._casts and not self.replaced:
            return  # each is of the dtype that it has in the inventory
        with no_function_modes():
            for slot in slots:
                tensor = self.current(slot.tensor)
                dtype = final_dtype(slot, self._request)
                if tensor.dtype == dtype:
                    continue
                allocator = allocator_for(tensor)
                if is_staged(allocator):
                    self._install(tensor, allocator.cast(tensor, dtype))
                elif allocator is not None:
                    tensor.data = tensor.data.to(dtype)

    def _install(self, old: Tensor, new: Tensor) -> None:
        """Exchange contents, or where that is impossible replace the object."""
        self.made.add(id(old))
        try:
            exchange(old, new, self.undo.push)
        except TypeError:  # the two classes have different layouts
            self._replace(old, new)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Put a new object into every slot that holds the old one."""
        new.__dict__.update(old.__dict__)
        _copy_hooks(old, new)
        for slot in self.inventory.slots_of(old):
            self.undo.push(partial(slot.write, old))
            slot.write(new)
        self.replaced[id(old)] = (old, new)
        self.made.add(id(new))

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory for a tensor, on the device where it is to stay."""
        allocator = allocator_for(tensor)
        assert allocator is not None, "checked in the plan"
        device = self._offloaded.get(id(tensor), self._request.device)
        if self._under_mode and type(tensor) in BARE_TYPES:
            with without_own_mode():
                return allocator.empty_like(tensor, device)
        return allocator.empty_like(tensor, device)

    def keep(self, home: Tensor, full: Tensor) -> None:
        """Keep the part of a full value that stays in this process."""
        allocator = staged_allocator(home)
        assert allocator is not None
        fresh = id(home) not in self.made
        device = self._offloaded.get(id(home), self._request.device)
        part = allocator.part_of(home, full, device if fresh else None)
        if part is not None:
            self._install(home, part)
            return
        if fresh:
            self._install(home, self._empty_like(home))
        allocator.keep(home, full)

    def fulfil(self, slot: Slot, write: Fill) -> bool:
        """Fill the part of a tensor that stays here; see the protocol."""
        home = self.current(slot.tensor)
        with no_function_modes():
            return staged_allocator(home) is not None and self._fulfil(home, write)

    def _fulfil(self, home: Tensor, write: Fill) -> bool:
        """Fill the part that stays in this process; False if that has no window.

        Not where the part is offloaded: another device may round otherwise.
        """
        allocator = staged_allocator(home)
        assert allocator is not None
        if id(home) in self._offloaded:
            return False
        if not allocator.fill(home, write, dry_run=True):
            return False
        if id(home) not in self.made:
            self._install(home, self._empty_like(home))
        return allocator.fill(home, write)

    def poison(self, tensor: Tensor) -> None:
        """Mark fresh memory, where the audit is going to read all of it."""
        if self._request.verify == "full":
            fill_poison(getattr(tensor, "_local_tensor", tensor))

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
            if base is not None:
                with torch.enable_grad():
                    view = view_like(member, base)
                if view is not None:
                    made[id(member)] = view
                    continue
            data = torch.empty(0, dtype=member.dtype, device=self._request.device)
            data.set_(block, member.storage_offset(), member.size(), member.stride())
            self.poison(data)
            made[id(member)] = dress(member, with_bits_of(member, data))
        for member in members:
            self._install(member, made[id(member)])


def _copy_hooks(old: Tensor, new: Tensor) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)

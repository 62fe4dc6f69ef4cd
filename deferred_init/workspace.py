"""The workspace: the only code that changes a model, and that can undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from deferred_init.aliases import StorageGroup
from deferred_init.distributed.fsdp2 import offload_devices
from deferred_init.handlers.plain import dress
from deferred_init.handlers.protocol import Request, Step, is_staged
from deferred_init.handlers.registry import allocator_for
from deferred_init.plan import final_dtype
from deferred_init.poison import fill_poison
from deferred_init.rebind import exchange
from deferred_init.record.paused import no_function_modes
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.staging import Staging, largest_staged_bytes, staged_allocator
from deferred_init.undo import ModuleSnapshot, UndoLog

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
        self._inventory = inventory
        self._request = request
        self._made: set[int] = set()
        modules = [site.module for site in inventory.sites()]
        self._offloaded = offload_devices(modules)
        self._largest_bytes = largest_staged_bytes(inventory)
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
        pair = self.replaced.get(id(tensor))
        return tensor if pair is None else pair[1]

    def allocate(self, slots: Sequence[Slot]) -> None:
        """Give memory to the tensors of the slots; their contents are undefined."""
        with no_function_modes():
            for slot in slots:
                if id(slot.tensor) in self._made:
                    continue
                group = self._inventory.groups[id(slot.tensor)]
                if group.shared:
                    self._allocate_shared(group)
                else:
                    new = self._empty_like(slot.tensor)
                    self._poison(new)
                    self._install(slot.tensor, new)

    def adopt(self, slot: Slot, tensor: Tensor) -> None:
        """Give the tensor object of a slot the contents of a newly made one."""
        target = self.current(slot.tensor)
        if tensor is target:
            return
        with no_function_modes():
            if staged_allocator(target) and not staged_allocator(tensor):
                self._keep(target, tensor)
                return
            if tensor.is_leaf:
                tensor.requires_grad_(target.requires_grad)
            self._install(target, tensor)
        if id(slot.tensor) in self.final_now:
            self.finish(slot)

    def rebind(self, slots: Sequence[Slot], tensor: Tensor) -> None:
        """Let whoever holds the tensors of the slots hold another one instead."""
        for slot in slots:
            old = self.current(slot.tensor)
            for place in self._inventory.slots_of(slot.tensor):
                if place.read() is old:
                    self.undo.push(partial(place.write, old))
                    place.write(tensor)
            self.replaced[id(slot.tensor)] = (slot.tensor, tensor)
            self._made.update((id(slot.tensor), id(tensor)))

    @contextmanager
    def filling(self, step: Step) -> Iterator[None]:
        """Let the body fill the step's tensors in place; see the protocol."""
        sites = step.site.post_order() if step.claim.rewrites else (step.site,)
        slots = [slot for site in sites for slot in site.slots]
        with no_function_modes():
            lent = self._lend_scratch(step, slots)
        try:
            with self._lending(step, slots):
                yield
        finally:
            for slot, original in lent:
                slot.write(original)

    @contextmanager
    def whole(self, step: Step) -> Iterator[None]:
        """Let the body write the step's tensors, and nothing else, in full size."""
        with self._lending(step, ()):
            yield

    @contextmanager
    def _lending(self, step: Step, others: Sequence[Slot]) -> Iterator[None]:
        """Allocate what is claimed, and lend in full size what is kept in part."""
        with no_function_modes():
            self.allocate(
                [s for s in step.claim.slots if not staged_allocator(s.tensor)]
            )
            staging = self._lend_staged(step, others)
        try:
            with staging or nullcontext():
                yield
            with no_function_modes():
                if staging is not None:
                    staging.keep_all()
                self._collect_replacements(step, staging)
        finally:
            if staging is not None:
                staging.give_back()

    def finish(self, slot: Slot) -> None:
        """Cast a tensor to its final dtype once nobody writes it any more."""
        with no_function_modes():
            tensor = self.current(slot.tensor)
            dtype = final_dtype(slot, self._request)
            if tensor.dtype == dtype or (allocator := allocator_for(tensor)) is None:
                return
            if is_staged(allocator):
                self._install(tensor, allocator.cast(tensor, dtype))
            else:
                tensor.data = tensor.data.to(dtype)

    def _install(self, old: Tensor, new: Tensor) -> None:
        """Exchange contents, or where that is impossible replace the object."""
        self._made.add(id(old))
        try:
            exchange(old, new, self.undo.push)
        except TypeError:  # the two classes have different layouts
            self._replace(old, new)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Put a new object into every slot that holds the old one."""
        new.__dict__.update(old.__dict__)
        _copy_hooks(old, new)
        for slot in self._inventory.slots_of(old):
            self.undo.push(partial(slot.write, old))
            slot.write(new)
        self.replaced[id(old)] = (old, new)
        self._made.add(id(new))

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory for a tensor, on the device where it is to stay."""
        allocator = allocator_for(tensor)
        assert allocator is not None, "checked in the plan"
        device = self._offloaded.get(id(tensor), self._request.device)
        return allocator.empty_like(tensor, device)

    def _keep(self, home: Tensor, full: Tensor) -> None:
        """Keep the part of a full value that stays in this process."""
        if id(home) not in self._made:
            self._install(home, self._empty_like(home))
        allocator = staged_allocator(home)
        assert allocator is not None
        allocator.keep(home, full)

    def _poison(self, tensor: Tensor) -> None:
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

    def _lend_scratch(
        self, step: Step, slots: Sequence[Slot]
    ) -> list[tuple[Slot, Tensor]]:
        """Replace what must not be written by scratch, for the time of one step."""
        claim = step.claim
        writable = {id(slot.tensor) for slot in (*claim.slots, *claim.rewrites)}
        lent: list[tuple[Slot, Tensor]] = []
        for slot in slots:
            if slot.kind not in (SlotKind.PARAMETER, SlotKind.BUFFER):
                continue
            made = id(slot.tensor) in self._made
            below = slot.owner is not step.site.module
            if id(slot.tensor) in writable or (below and made):
                continue
            original = self.current(slot.tensor)
            if staged_allocator(original) is not None:
                continue
            slot.write(_scratch_like(original, self._request.device, copy=not made))
            lent.append((slot, original))
        return lent

    def _lend_staged(self, step: Step, others: Sequence[Slot]) -> Staging | None:
        """Lend tensors of full size for those of which only a part stays here."""
        claim = step.claim
        claimed = {id(slot.tensor): slot for slot in (*claim.slots, *claim.rewrites)}
        lent = {id(slot.tensor): slot for slot in others}
        staging: Staging | None = None
        for key, slot in {**lent, **claimed}.items():
            home = self.current(slot.tensor)
            allocator = staged_allocator(home)
            if allocator is None:
                continue
            if staging is None:
                staging = Staging(
                    self._request.device, self._largest_bytes, self._keep, self._poison
                )
            made = key in self._made
            staging.lend(
                self._inventory.slots_of(slot.tensor),
                home,
                allocator,
                keeps=key in claimed or (made and slot.owner is not step.site.module),
                stored=made or not home.is_meta,
            )
        return staging

    def _collect_replacements(self, step: Step, staging: Staging | None) -> None:
        """Adopt tensors that the body put in place of the ones it was given."""
        for slot in step.claim.slots:
            found = slot.read()
            home = self.current(slot.tensor)
            if staging is not None and staging.loan_of(found) is not None:
                self.allocate((slot,))  # an init function may leave it as it is
            elif found is not home:
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

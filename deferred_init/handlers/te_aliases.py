"""Brings together again what several places of `te.ops` hold of one parameter.

A fused op registers its basic ops' parameters as its own, and a fuser caches them.
Whatever replaces objects (`to_empty`, a first step that failed) leaves them apart.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformer_engine.pytorch.ops.op import FusedOperation

from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.object_contents import look_into
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.te.fusers import find_fusers, stale_parameters

__all__ = ["FusedOpAliases", "StaleFuserParameters"]


class FusedOpAliases:
    """Points the parameters that a fused op registers too at those of its basic ops.

    `ops.Linear` registers its basic ops' `weight` and `bias` as its own. Whatever
    replaces objects (`to_empty`, a first step that failed) leaves them apart.
    """

    name = "te.ops aliases"
    composite = True

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim aliases without memory, and basic parameters whose alias has it."""
        if _is_whole(site):
            return None
        slots: list[Slot] = []
        rewrites: list[Slot] = []
        for alias, own in _aliases(site):
            if alias.tensor is own.tensor or not (alias.deferred or own.deferred):
                continue
            if alias in pending:
                slots.append(alias)
            if own.deferred:
                rewrites.append(own)
        if not (slots or rewrites):
            return None
        return Claim(slots=tuple(slots), rewrites=tuple(rewrites), source="alias")

    def run(self, step: Step, workspace: Workspace) -> None:
        """Make the two the same object again."""
        claim = step.claim
        for alias, own in _aliases(step.site):
            if alias.tensor is own.tensor:
                continue
            if alias in claim.slots and own in claim.rewrites:
                workspace.rebind((alias,), own.read())
            elif alias in claim.slots:
                workspace.adopt(alias, own.read())
                workspace.rebind((own,), alias.read())
            elif own in claim.rewrites:
                workspace.rebind((own,), alias.read())


class StaleFuserParameters:
    """Gives the parameters that a failed first step left in a fuser their contents.

    The hook ran inside the first forward: the op has a new Parameter with memory,
    while the fuser, and every optimizer built before, hold the old one without. The
    old object takes over the contents and goes back into the op.
    """

    name = "te.ops fuser"
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim stale parameters found in a fuser that the module holds."""
        if not any("_basic_op_params" in slot.name for slot in pending):
            return None
        known = {id(tensor) for tensor, _ in _stale(site.module)}
        made = tuple(slot for slot in pending if slot.tensor_id in known)
        return Claim(slots=made, source="contents of the op") if made else None

    def run(self, step: Step, workspace: Workspace) -> None:
        """Exchange contents, and put the old objects back into their ops."""
        actual = {id(cached): made for cached, made in _stale(step.site.module)}
        places = {
            slot.tensor_id: slot
            for site in step.site.post_order()
            for slot in site.slots
            if slot.kind is SlotKind.PARAMETER
        }
        for slot in step.claim.slots:
            made = actual[slot.tensor_id]
            workspace.adopt(slot, made)
            workspace.rebind((places[id(made)],), slot.read())


def _stale(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pair each cached tensor without memory with the one that its op has now."""
    return [
        (cached, now)
        for fuser in find_fusers([module])
        for _, _, cached, now in stale_parameters(fuser)
        if now is not None and cached.is_meta and not now.is_meta
    ]


def _is_whole(site: ModuleSite) -> bool:
    """Whether each parameter of a fused op is the very one of a basic op."""
    ops = tuple(getattr(site.module, "basic_ops", ()))
    return all(
        any(op._parameters.get(slot.name) is slot.tensor for op in ops)
        for slot in site.slots
        if slot.kind is SlotKind.PARAMETER
    )


def _aliases(site: ModuleSite) -> list[tuple[Slot, Slot]]:
    """Pair a fused op's own parameters with those of the same name of its ops."""
    own = [slot for slot in site.slots if slot.kind is SlotKind.PARAMETER]
    if not own:
        return []
    ops = {id(op) for op in getattr(site.module, "basic_ops", ())}
    below = [
        slot
        for inner in site.post_order()
        if id(inner.module) in ops
        for slot in inner.slots
        if slot.kind is SlotKind.PARAMETER
    ]
    pairs = []
    for alias in own:
        same = [
            slot
            for slot in below
            if slot.name == alias.name and slot.tensor.shape == alias.tensor.shape
        ]
        if len(same) == 1:
            pairs.append((alias, same[0]))
    return pairs


look_into("transformer_engine.pytorch.ops.fuser", "OperationFuser")
add_initializer(FusedOpAliases(), FusedOperation)
add_initializer(StaleFuserParameters(), first=True)

"""What can make a plan impossible, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from deferred_init.aliases import byte_span, is_sharded, same_elements
from deferred_init.errors import listing
from deferred_init.handlers.protocol import Claim, Request
from deferred_init.handlers.registry import allocator_for
from deferred_init.rebind import outside_use
from deferred_init.record.kept_states import is_kept
from deferred_init.record.tokens import is_token_state
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.tensor_names import names_for

__all__ = [
    "kept_tokens",
    "left_behind",
    "misfit_shards",
    "name_collisions",
    "unallocatable",
    "unclaimed",
]


def unclaimed(
    inventory: Inventory, deferred: Sequence[Slot], claimed: set[int]
) -> list[str]:
    """Name every deferred tensor that nobody makes, in one problem text."""
    left = [
        slot
        for slot in deferred
        if slot.tensor_id not in claimed and not _lies_within(inventory, slot, claimed)
    ]
    if not left:
        return []
    owners = dict.fromkeys(type(slot.owner).__name__ for slot in left)
    carried = any(slot.kind is SlotKind.TENSOR_ATTRIBUTE for slot in left)
    described = [slot.describe()[1:].replace("`", "", 1) for slot in left]
    names = ", ".join(
        f"`{name.split(' ', 1)[0]}` {name.split(' ', 1)[1]}" for name in described[:10]
    )
    more = f", ... and {len(left) - 10} more" if len(left) > 10 else ""
    extra = (
        " Tensors that a Parameter carries are attached after `materialize`."
        if carried
        else ""
    )
    verb = "tensor has" if len(left) == 1 else "tensors have"
    return [
        f"{len(left)} {verb} no initializer: {names}{more}. Build the model inside "
        f"`deferred_init(...)`, register an initializer for {listing(list(owners))}, "
        f"or load real values into them before.{extra}"
    ]


def kept_tokens(inventory: Inventory) -> list[str]:
    """Name states of generators that were saved while draws were only recorded."""
    kept = [
        slot.fqn
        for slot in inventory.slots
        if slot.tensor.dtype is torch.uint8
        and is_token_state(slot.tensor)
        and not is_kept(slot.tensor)
    ]
    if not kept:
        return []
    return [
        f"{listing(kept)}: a generator's state that was saved inside `deferred_init`, "
        "where nothing is drawn, so that it is not the one of eager construction; save "
        "it after `materialize`"
    ]


def _lies_within(inventory: Inventory, slot: Slot, claimed: set[int]) -> bool:
    """Whether a tensor is a view into memory that a claimed tensor fills."""
    start, end = byte_span(slot.tensor)
    for member in inventory.groups[slot.tensor_id].members:
        if id(member) not in claimed:
            continue
        if same_elements(member, slot.tensor):
            return True
        if member.is_contiguous():
            first, last = byte_span(member)
            if first <= start and end <= last:
                return True
    return False


def unallocatable(deferred: Sequence[Slot], request: Request) -> list[str]:
    """Name tensors whose type or layout no allocator can make."""
    problems = []
    for slot in deferred:
        if is_lazy(slot.tensor) and isinstance(slot.owner, LazyModuleMixin):
            continue  # named by the initializer of lazy modules
        allocator = allocator_for(slot.tensor)
        if allocator is None:
            problems.append(
                f"{slot.describe()} is a `{type(slot.tensor).__name__}`, a tensor "
                "subclass that no allocator claims: expected a parameter that is "
                "not converted yet. Call `materialize` first, then convert "
                "(quantize) the model"
            )
        elif (reason := allocator.problem(slot.tensor, request)) is not None:
            problems.append(f"{slot.describe()} {reason}")
    return problems


def misfit_shards(inventory: Inventory, claims: Iterable[Claim]) -> list[str]:
    """Name weights that cannot be stored quantized in the shards that they have."""
    stored = [
        slot for claim in claims for slot, _ in claim.stored if is_sharded(slot.tensor)
    ]
    if not stored:
        return []
    from deferred_init.distributed.quantized_shards import unfit_shards

    reasons = unfit_shards(site.module for site in inventory.sites())
    by_others = "FSDP2 did not shard it: materialize the model first, then shard it"
    return [
        f"{slot.describe()} is to be stored quantized, but {reason}"
        for slot in stored
        if (reason := reasons.get(slot.tensor_id, by_others))
    ]


def name_collisions(deferred: Sequence[Slot], request: Request) -> list[str]:
    """Name tensors that a policy could not tell apart, which goes by names."""
    known = names_for(request)
    names: dict[str, int] = {}
    clashes: list[str] = []
    for slot in deferred:
        name = known.of(slot)
        if names.setdefault(name, slot.tensor_id) != slot.tensor_id:
            clashes.append(name)
    if not clashes:
        return []
    return [
        f"{len(clashes)} names stand for two different tensors each under "
        f'rng="{request.rng}", which would give both the same values: '
        f"{listing(clashes)}. Materialize these models one by one with different seeds"
    ]


def left_behind(inventory: Inventory, deferred: Sequence[Slot]) -> tuple[str, ...]:
    """Describe views and graphs outside the model that will stay without memory.

    Python has no way to find them: a view in a local variable refers to the C++
    tensor, not to the object whose contents are exchanged.
    """
    found = []
    for slot in deferred:
        members = inventory.groups[slot.tensor_id].members
        views = 0
        if len(members) > 1:
            views = sum(one._is_view() and one._base is slot.tensor for one in members)
        reason = outside_use(slot.tensor, known_views=views)
        if reason is not None:
            found.append(f"`{slot.fqn}`: {reason}, and stays without memory")
    return tuple(found)

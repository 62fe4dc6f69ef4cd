"""Initializer for Hugging Face models that can be constructed a second time.

[Note: Construct again]
Problem: eager construction of a `PreTrainedModel` draws random numbers and computes
buffers in the constructors of its modules, most of which have no reset method; then
`initialize_weights` overwrites a part. What a constructor did cannot be read off a
module that it left behind.

Naive attempt: call reset methods in tree order, then `initialize_weights`. Buffers
that no `_init_weights` refills stay garbage, and each `torch.randn` of a constructor
is missing from the random stream.

Why another way is open: a `PreTrainedModel` keeps what it was constructed from, its
class and its config. The plan constructs it again on meta; if modules, tensors,
dtypes and ties come out the same, then execution constructs it once more on the
device, and the model's own tensor objects take the contents over, one by one. Of a
mostly loaded model, and under `rng="by_name"`, the second construction is recorded
instead, and only what is wanted of it gets memory (`twin_replay.py`).

Shortcomings: a model changed since (adapters, resized embeddings) comes out
different and is left to the initializer in `hf.py`, part by part where its parts
are models themselves. A config edited afterwards in a way that changes values but no
shape is taken at its word. A recording costs a millisecond per operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from deferred_init.aliases import dense_bytes, is_sharded, storage_key
from deferred_init.distributed.fsdp2 import unsharded_class
from deferred_init.fresh_memory import PoisonedMemory
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.hf_flags import copy_flag
from deferred_init.inventory import site_of
from deferred_init.reconstruction import Construction, find_construction
from deferred_init.record.paused import no_function_modes
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.target_dtype import final_dtype
from deferred_init.twin import matching_modules, matching_slots, tie_again
from deferred_init.twin_replay import replay_twin

__all__ = ["HFConstructor"]

_SMALL_BYTES = 64 * 2**20


class HFConstructor:
    """Makes whole `PreTrainedModel`s by constructing them a second time."""

    name = "transformers constructor"
    composite = True

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, Construction]
        self._known = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim nothing: only whole trees are made."""
        return None

    def claim_tree(self, site: ModuleSite, request: Request) -> Claim | None:
        """Claim all deferred tensors if a second construction on meta agrees."""
        if not isinstance(site.module, PreTrainedModel):
            return None
        slots = _slots(site)
        deferred = [slot for slot in slots if slot.deferred]
        if not all(map(_is_plain, deferred)):
            return None
        found = find_construction(site)
        if found is None:
            return None
        construction, twin = found
        pairs = matching_slots(site, slots, twin)
        without_memory = set(map(id, deferred))
        made = [slot for slot, _ in pairs if id(slot) in without_memory]
        stray = _stray([pair for pair in pairs if id(pair[0]) not in without_memory])
        self._known[site.module] = construction
        others = _bytes(slots, but=deferred)
        return Claim(
            slots=(*made, *stray),
            source=construction.describe(site.module),
            scratch_bytes=min(others, _room(deferred)) if others else 0,
            assumptions=(*construction.assumptions(site.module), *map(_made, stray)),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Construct the model on the device and take its tensors over."""
        site = step.site
        construction = self._known[site.module]
        # Outside of the default device, with which each look at a tensor is slow.
        with no_function_modes():
            slots = _slots(site)
            claimed = {slot.tensor_id for slot in step.claim.slots}
            stray = {s.tensor_id for s in step.claim.slots if not s.deferred}
            one_by_one = _one_by_one(step.claim.slots, slots, workspace.request)

        def give(slot: Slot, tensor: Tensor) -> None:
            if slot.tensor_id in stray:
                workspace.rebind([slot], _dressed(slot.tensor, tensor))
            else:
                workspace.adopt(slot, _dressed(slot.tensor, tensor))

        if one_by_one:
            built = replay_twin(
                lambda: construction.build(site.module),
                lambda twin: _own(matching_slots(site, slots, site_of(twin)), claimed),
                give,
                workspace,
            )
        else:
            full = workspace.request.verify == "full"
            with PoisonedMemory() if full else nullcontext():
                built = construction.build(site.module)
        with no_function_modes():
            twin = site_of(built)
            pairs = matching_slots(site, slots, twin)
            for slot, tensor in () if one_by_one else _own(pairs, claimed):
                give(slot, tensor)
            _follow(pairs, claimed, workspace)
            for ours, its in matching_modules(site, twin):
                copy_flag(its, ours)


def _slots(site: ModuleSite) -> list[Slot]:
    return [slot for below in site.post_order() for slot in below.slots]


def _one_by_one(made: Sequence[Slot], slots: Sequence[Slot], request: Request) -> bool:
    """Whether a recording has to make the tensors, and not the constructor at once.

    Where not all of them are wanted in full (or at all), and where they are cast, so
    as not to hold the whole in two dtypes.
    """
    if request.rng != "eager":
        return True
    if any(is_sharded(slot.tensor) for slot in made):
        return True
    casts = request.dtype is not None or request.recipe is not None
    if casts and any(final_dtype(slot, request) != slot.tensor.dtype for slot in made):
        return True
    others = _bytes(slots, but=made)
    return others > 0 and others > _room(made)


def _follow(
    pairs: list[tuple[Slot, Tensor]], claimed: set[int], workspace: Workspace
) -> None:
    """Tie what the twin ties."""
    kept = _kept(pairs, claimed)
    for slot, tensor in pairs:
        keeper = kept[id(tensor)]
        if slot.tensor is not keeper.tensor:
            tie_again(slot, keeper, workspace)


def _dressed(like: Tensor, made: Tensor) -> Tensor:
    """Give a tensor of the twin the class and the dtype of the model's."""
    if unsharded_class(like) is not type(like):
        return made  # the workspace keeps this rank's part of it
    if type(made) is type(like) and made.dtype == like.dtype:
        return made
    data = made.detach()
    data = data if data.dtype == like.dtype else data.to(like.dtype)
    if type(like) is Tensor:
        return data.requires_grad_(like.requires_grad)
    return Tensor._make_subclass(type(like), data, like.requires_grad)


def _own(pairs: list[tuple[Slot, Tensor]], claimed: set[int]) -> list[Any]:
    """Of the pairs, one for each claimed tensor that stays."""
    kept = _kept(pairs, claimed)
    return [
        (slot, tensor)
        for slot, tensor in pairs
        if kept[id(tensor)] is slot and slot.tensor_id in claimed
    ]


def _kept(pairs: list[tuple[Slot, Tensor]], claimed: set[int]) -> dict[int, Slot]:
    """For each tensor of the twin, the slot whose tensor object stands for it.

    That is the first one, or a loaded one. The twin may have ties that the model has
    lost: `.to("meta")` makes one tensor per name, and so do loaders.
    """
    kept: dict[int, Slot] = {}
    for slot, tensor in pairs:
        known = kept.setdefault(id(tensor), slot)
        if known.tensor_id in claimed and slot.tensor_id not in claimed:
            kept[id(tensor)] = slot
    return kept


def _stray(pairs: list[tuple[Slot, Tensor]]) -> list[Slot]:
    """Parameters that are real only since `torch.Tensor(n)` does not know devices.

    They lack the values that `initialize_weights` gives in eager construction. If any
    other parameter is real, then something was loaded, perhaps these too.

    Args:
        pairs: Slots that have memory, with the tensors of the twin on meta.
    """
    real = [
        (slot, tensor.is_meta)
        for slot, tensor in pairs
        if slot.kind is SlotKind.PARAMETER
    ]
    return [] if any(deferred for _, deferred in real) else [slot for slot, _ in real]


def _made(stray: Slot) -> str:
    return (
        f"`{stray.fqn}` has memory only because its constructor ignores the meta "
        "device, and is made anew"
    )


def _is_plain(slot: Slot) -> bool:
    return unsharded_class(slot.tensor) in (Tensor, nn.Parameter)


def _bytes(slots: Iterable[Slot], but: Sequence[Slot]) -> int:
    """Bytes of the tensors in some slots, without those in others."""
    known = {slot.tensor_id for slot in but}
    rest = [slot.tensor for slot in slots if slot.tensor_id not in known]
    if not rest:
        return 0
    left_out = {storage_key(slot.tensor) for slot in but}
    sizes = {storage_key(tensor): dense_bytes(tensor) for tensor in rest}
    return sum(size for key, size in sizes.items() if key not in left_out)


def _room(made: Iterable[Slot]) -> int:
    """Bytes that may be spent on tensors which nobody wants."""
    return max([_SMALL_BYTES, *(dense_bytes(slot.tensor) for slot in made)])


add_initializer(HFConstructor(), first=True)

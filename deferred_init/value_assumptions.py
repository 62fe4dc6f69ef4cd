"""Says where a meta tensor shows that its module's init method is not all there was.

A tensor on meta has no values, but it counts its writes in `_version`, and it has a
dtype. Both can tell of something that was done to it after its module was constructed,
though not what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from deferred_init.aliases import is_recorded, is_sharded
from deferred_init.errors import listing
from deferred_init.handlers.protocol import Claim, Step
from deferred_init.slots import Inventory, Slot

__all__ = ["value_assumptions"]

_TORCH = "torch.nn"
_PLAIN = (nn.Parameter, torch.Tensor)
# Filled with constants, which are the same in every dtype.
_CONSTANT = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU, _NormBase)


def value_assumptions(
    steps: Sequence[Step], inventory: Inventory, deferred: Sequence[Slot]
) -> tuple[str, ...]:
    """Name tensors that were written otherwise than their steps do, or cast since.

    Only tensors are named of whose writes every step tells how many there are: those
    of torch's `reset_parameters` and of init methods that were tried. A write through
    `.data` is not counted by torch.
    """
    return (
        *_written(steps, inventory),
        *_cast(tuple(_made_by_torch(steps))),
        *_gradients(deferred),
    )


def _gradients(deferred: Sequence[Slot]) -> Iterator[str]:
    """Name tensors without memory whose `grad` is set, as a backward leaves it."""
    found = [
        slot.fqn
        for slot in deferred
        if slot.tensor.requires_grad and slot.tensor.is_leaf
        if slot.tensor.grad is not None
    ]
    if found:
        yield (
            f"{listing(found)}: the gradients that were computed without memory are "
            "not needed, and are left out; where they are, run the backward after "
            "`materialize`"
        )


def _written(steps: Sequence[Step], inventory: Inventory) -> Iterator[str]:
    """Name what was written more often than the steps write it, or less often."""
    default = torch.get_default_dtype()
    more, less = [], []
    told = {s.tensor_id for step in steps for s in _told_of(step.claim)}
    for slot, expected in _expected(steps):
        tensor = slot.tensor
        # Inference tensors count no writes, and views count those to their base too.
        if tensor.is_inference() or inventory.groups[slot.tensor_id].shared:
            continue
        if is_sharded(tensor):  # whose writes count from when it was sharded
            expected = 0
        num_more = tensor._version - expected
        if num_more > 0:
            more.append(slot.fqn)
        # What was sharded or cast is another object as well, and named elsewhere.
        elif num_more < 0 and tensor.dtype == default and type(tensor) in _PLAIN:
            less += [slot.fqn] if slot.tensor_id not in told else []
    if more:
        yield (
            f"{listing(more)}: what was written there after the constructor of its "
            "own module changed no value; where it did, build the model inside "
            "`deferred_init(...)`"
        )
    if less:
        yield (
            f"{listing(less)}: copied or put there after the constructor of its own "
            "module had drawn others, or not initialized by it; values are given as "
            "if it had and those had stayed. Where they are not the same, build the "
            "model inside `deferred_init(...)`"
        )


def _told_of(claim: Claim) -> tuple[Slot, ...]:
    """Return what an init method writes whose claim says already what it assumes."""
    known = claim.num_writes is not None and claim.assumptions
    return (*claim.slots, *claim.rewrites) if known else ()


def _expected(steps: Sequence[Step]) -> Iterator[tuple[Slot, int]]:
    """Yield tensors of whose writes all is known, and how many the steps make."""
    found: dict[int, Slot] = {}
    counts: dict[int, int] = {}
    unknown: set[int] = set()
    for step in steps:
        claim = step.claim
        for slot in (*claim.slots, *claim.rewrites):
            if is_recorded(slot.tensor):
                continue
            key = slot.tensor_id
            if claim.num_writes is not None:
                counts[key] = counts.get(key, 0) + claim.num_writes[key]
            elif step.initializer.name == _TORCH and slot not in claim.rewrites:
                counts[key] = counts.get(key, 0) + _num_writes(slot)
            else:
                unknown.add(key)
            found.setdefault(key, slot)
    for key, slot in found.items():
        if key not in unknown:
            yield slot, counts[key]


def _cast(slots: Sequence[Slot]) -> Iterator[str]:
    default = torch.get_default_dtype()
    cast: dict[torch.dtype, list[str]] = {}
    for slot in slots:
        dtype = slot.tensor.dtype
        other = dtype.is_floating_point and dtype != default
        if other and not isinstance(slot.owner, _CONSTANT):
            cast.setdefault(dtype, []).append(slot.fqn)
    for dtype, names in cast.items():
        yield (
            f"{listing(names)}: constructed in {dtype}; where they were cast to it "
            f"later (`model.to({dtype})`), leave that out and pass `dtype=` to "
            "`materialize`, or build the model inside `deferred_init(...)`"
        )


def _made_by_torch(steps: Sequence[Step]) -> Iterator[Slot]:
    for step in steps:
        if step.initializer.name == _TORCH:
            for slot in step.claim.slots:
                if not is_recorded(slot.tensor):
                    yield slot


def _num_writes(slot: Slot) -> int:
    """Writes to a tensor by torch's own constructor of its module."""
    embedding = isinstance(slot.owner, (nn.Embedding, nn.EmbeddingBag))
    return 2 if embedding and slot.owner.padding_idx is not None else 1

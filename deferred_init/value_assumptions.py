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

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Step
from deferred_init.slots import Slot

__all__ = ["value_assumptions"]

_TORCH = "torch.nn"
_PLAIN = (nn.Parameter, torch.Tensor)
# Filled with constants, which are the same in every dtype.
_CONSTANT = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU, _NormBase)


def value_assumptions(steps: Sequence[Step]) -> tuple[str, ...]:
    """Name tensors of `torch.nn` modules that were written, replaced or cast since.

    Only tensors are named that one `reset_parameters` of torch's makes and no other
    initializer writes to. A write through `.data` is not counted by torch.
    """
    slots = tuple(_made_by_torch(steps))
    return (*_written(steps, slots), *_cast(slots))


def _written(steps: Sequence[Step], slots: Sequence[Slot]) -> Iterator[str]:
    """Name what was written more often than torch's constructors do, or less often."""
    again = {id(slot.tensor) for step in steps for slot in step.claim.rewrites}
    default = torch.get_default_dtype()
    more, less = [], []
    for slot in slots:
        tensor = slot.tensor
        if id(tensor) in again or tensor.is_inference():  # which counts no writes
            continue
        num_more = tensor._version - _num_writes(slot)
        if num_more > 0:
            more.append(slot.fqn)
        # What was sharded or cast is another object as well, and named elsewhere.
        elif num_more < 0 and tensor.dtype == default and type(tensor) in _PLAIN:
            less.append(slot.fqn)
    if more:
        yield (
            f"{listing(more)}: what was written there after the constructor of its "
            "own module changed no value; where it did, build the model inside "
            "`deferred_init(...)`"
        )
    if less:
        yield (
            f"{listing(less)}: copied or put there after the constructor of its own "
            "module had drawn others; values are given as if those had stayed. "
            "Where they are not the same, build the model inside `deferred_init(...)`"
        )


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
                if not hasattr(type(slot.tensor), "__records_operations__"):
                    yield slot


def _num_writes(slot: Slot) -> int:
    """Writes to a tensor by torch's own constructor of its module."""
    embedding = isinstance(slot.owner, (nn.Embedding, nn.EmbeddingBag))
    return 2 if embedding and slot.owner.padding_idx is not None else 1

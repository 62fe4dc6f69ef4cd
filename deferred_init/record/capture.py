"""Bring real tensors into a recording: as constants, copies or guarded references."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.aliases import dense_bytes
from deferred_init.record.append import append
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import External, Place, Value
from deferred_init.record.paused import no_dispatch
from deferred_init.record.tensor import DeferredTensor, late, new_value, value_of, wrap

__all__ = ["as_value", "capture", "constant"]

_SNAPSHOT_BYTES = 1 << 20
_META = torch.device("meta")


def capture(recording: Recording, tensor: Tensor) -> External:
    """Hold a real tensor that a node reads: a copy if small, else guarded."""
    small = dense_bytes(tensor) <= _SNAPSHOT_BYTES
    storage = tensor.untyped_storage()
    if small or storage._cdata in recording.borrowed:
        return External(tensor.detach().clone(), guarded=False)
    # Not detached: here, below autograd, that would not share the version counter.
    return External(tensor, guarded=not tensor.is_inference())


def constant(
    recording: Recording, tensor: Tensor, place: torch.device | None
) -> DeferredTensor:
    """Record a real tensor as the value of a new deferred one."""
    with recording.lock, no_dispatch():
        held = capture(recording, tensor)
        meta = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META
        )
        node = append(recording, _copy_of, (held, Place(place)))
        value = new_value(recording, node.index, meta, place)
        node.outs = (value,)
        return wrap(value)


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor with the same values and strides on a device."""
    result = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
    )
    return result.copy_(tensor)


def as_value(recording: Recording, tensor: Tensor) -> Value:
    """Return the value of a deferred tensor, or record a real one."""
    if isinstance(tensor, DeferredTensor):
        value = value_of(tensor)
        if value.recording is recording:
            return value
        return value_of(tensor.clone())
    return value_of(constant(recording, tensor, None))


late.as_value = as_value

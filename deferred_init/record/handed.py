"""Remember, without keeping it alive, the real storage behind a recorded one.

A tensor that is made real later than another over the same storage must share its
memory and see what was written to it since.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deferred_init.record.nodes import Value

__all__ = ["hand_out", "handed_out"]


def hand_out(value: Value, tensor: Tensor, device: torch.device) -> None:
    """Remember the storage of a tensor that is being handed out."""
    if tensor.layout != torch.strided:
        return
    storage = tensor.untyped_storage()
    last = value.storage.writers[-1] if value.storage.writers else -1
    value.storage.real = (device, StorageWeakRef(storage), last)


def handed_out(value: Value, device: torch.device) -> Tensor | None:
    """Return a tensor over the storage handed out for a value, if it still lives."""
    known = value.storage.real
    if known is None:
        return None
    at, reference, last = known
    writers = value.storage.writers
    if at != device or reference.expired() or (writers and writers[-1] != last):
        return None
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    meta = value.meta
    tensor = torch.empty(0, dtype=meta.dtype, device=storage.device)
    with torch.no_grad():
        return tensor.set_(storage, meta.storage_offset(), meta.size(), meta.stride())

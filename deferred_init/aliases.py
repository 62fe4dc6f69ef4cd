"""Questions to tensors: who has no memory, who is a part, who shares one storage."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deferred_init.small_values import small_value

__all__ = [
    "BARE_TYPES",
    "StorageGroup",
    "byte_span",
    "dense_bytes",
    "group_by_storage",
    "has_deferred",
    "has_own_dispatch",
    "is_deferred",
    "is_recorded",
    "is_sharded",
    "same_elements",
    "storage_key",
]

BARE_TYPES = frozenset({Tensor, nn.Parameter})
"""Types of tensors that no subclass has any say in."""


def is_deferred(tensor: Tensor) -> bool:
    """Tell whether a tensor has no memory: meta, recorded, fake, or still lazy."""
    if type(tensor) in BARE_TYPES:  # the rule; neither lazy nor fake
        return tensor.is_meta
    if is_recorded(tensor):
        return bool(tensor.lacks_memory)  # type: ignore[attr-defined]
    if tensor.is_meta or is_lazy(tensor):
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def is_recorded(tensor: Tensor) -> bool:
    """Tell whether a tensor belongs to a recording, see `record/tensor.py`."""
    return hasattr(type(tensor), "__records_operations__")


def has_deferred(models: Iterable[nn.Module]) -> bool:
    """Tell whether any registered parameter or buffer of any model has no memory."""
    return any(
        is_deferred(tensor)
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
    )


def has_own_dispatch(tensor_type: type[Tensor]) -> bool:
    """Tell whether a class of tensors keeps its data in a way of its own.

    DTensors, quantized, fake and recorded tensors do: they answer to operations by a
    `__torch_dispatch__`, and have no storage that says all of them.
    """
    return tensor_type.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_sharded(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor, which need not be imported for that."""
    return hasattr(tensor, "device_mesh")


def dense_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, also for a sparse one."""
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int | None:
    """Return a key that is equal for two tensors exactly if they share storage.

    On meta `data_ptr()` is 0 for every tensor, so the address of the storage's
    implementation is used; `None` for a tensor that has no storage of its own.
    A wrapper subclass may offer `__storage_key__()` to answer for itself.
    """
    own = getattr(type(tensor), "__storage_key__", None)
    if own is not None:
        key = own(tensor)
        return key if key is None else int(key)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, opaque
        return None


@small_value
class StorageGroup:
    """All distinct tensor objects of one inventory that share one storage.

    Attributes:
        key: The storage key; unique in the inventory.
        members: The tensor objects, in inventory order.
        shared: Whether the storage has to be allocated as one block for several.
    """

    key: int
    members: tuple[Tensor, ...]
    shared: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the one storage behind the members."""
        first = self.members[0]
        if not self.shared:
            return dense_bytes(first)
        return int(first.untyped_storage().nbytes())


def group_by_storage(tensors: Iterable[Tensor]) -> dict[int, StorageGroup]:
    """Group distinct tensor objects by storage; maps `id(tensor)` to its group."""
    by_key: dict[int, list[Tensor]] = {}
    seen: set[int] = set()
    for tensor in tensors:
        tensor_id = id(tensor)
        if tensor_id in seen:
            continue
        seen.add(tensor_id)
        key = storage_key(tensor)
        by_key.setdefault(-tensor_id if key is None else key, []).append(tensor)
    groups: dict[int, StorageGroup] = {}
    for key, members in by_key.items():
        shared = len(members) > 1 or not _covers_storage(members[0])
        group = StorageGroup(key=key, members=tuple(members), shared=shared)
        groups.update((id(member), group) for member in members)
    return groups


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor may touch: [first, past last)."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    if tensor.is_nested:  # rows of different lengths, whose sizes are no numbers
        return start, start + int(tensor.numel()) * size
    reach = sum(
        (int(length) - 1) * int(stride)
        for length, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return start, start + (reach + 1) * size


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Tell whether two meta tensors of one storage are windows on the same elements.

    Recorded tensors know their own writers and are left out.
    """
    if is_recorded(one):
        return False
    return (
        one.dtype == other.dtype
        and one.size() == other.size()
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def _covers_storage(tensor: Tensor) -> bool:
    """Whether a fresh `empty_strided` of the same geometry is an exact replacement."""
    if has_own_dispatch(type(tensor)):
        return True
    try:
        storage_bytes = tensor.untyped_storage().nbytes()
        return tensor.storage_offset() == 0 and storage_bytes == dense_bytes(tensor)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, opaque
        return True

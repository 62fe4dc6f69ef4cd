"""Moves, casts and deep copies of deferred tensors, recorded as single nodes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.record.append import append
from deferred_init.record.nodes import Place, Value
from deferred_init.record.ops import record
from deferred_init.record.paused import no_dispatch
from deferred_init.record.tensor import (
    deferred_class,
    final_class,
    late,
    make_parameter,
    new_value,
    user_attributes,
    value_of,
    wrap,
)

__all__ = ["deepcopy", "shallow_copy", "to"]

_META = torch.device("meta")
_to_copy = torch.ops.aten._to_copy.default


def to(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Record `Tensor.to`: the tensor itself if nothing changes, else a copy."""
    value = value_of(tensor)
    force = kwargs.get("copy", False)
    device, dtype, memory_format = _parse(args, kwargs)
    recording = value.recording
    place = value.device
    if device is not None:
        if device == _META:
            if recording.active:
                return value.meta if dtype is None else value.meta.to(dtype)
            return tensor if dtype is None else tensor.to(dtype)
        own = recording.device
        same = device.type == own.type and device.index in (None, own.index)
        place = None if same else device
    dtype = value.meta.dtype if dtype is None else dtype
    moved = place != value.device
    if not (moved or force or dtype != value.meta.dtype) and (
        memory_format in (None, torch.preserve_format)
        or tensor.is_contiguous(memory_format=memory_format)
    ):
        return tensor
    options: dict[str, Any] = {"dtype": dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    if torch.is_grad_enabled() and tensor.requires_grad and not moved:
        result: Tensor = torch._C.TensorBase.to(tensor, **options)
        return result
    out: Tensor = record(recording, _to_copy, (tensor,), options, Place(place))
    return out


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Read device, dtype and memory format of `Tensor.to`, touching no device."""
    other = args[0] if args else kwargs.get("tensor")
    if isinstance(other, Tensor):
        return other.device, other.dtype, kwargs.get("memory_format")
    args = tuple(args)
    rest = {k: v for k, v in kwargs.items() if k != "copy"}
    if len(args) > 2 and isinstance(args[-1], bool) and isinstance(args[-2], bool):
        args = args[:-1]
    with torch._C.DisableTorchFunction():
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **rest)
    return device, dtype, memory_format


def shallow_copy(tensor: Tensor) -> Tensor:
    """Copy a deferred tensor as `copy.copy` copies a real one: a leaf, same values."""
    final = final_class(tensor)
    result: Tensor = (
        make_parameter(final, tensor, tensor.requires_grad)
        if final is not Tensor
        else wrap(value_of(tensor), tensor.requires_grad)
    )
    result.__dict__.update(user_attributes(tensor))
    return result


def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a deferred tensor as `copy.deepcopy` copies a real one.

    A parameter is cloned alone and loses its attributes; a tensor takes a copy of
    its whole storage along, which its views in the same deep copy share.
    """
    known = memo.get(id(tensor))
    if known is not None:
        result: Tensor = known
        return result
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the "
            "deepcopy protocol at the moment."
        )
    final = final_class(tensor)
    if final is nn.Parameter:
        with torch.no_grad():
            source = torch.clone(tensor.detach(), memory_format=torch.preserve_format)
        copied: Tensor = nn.Parameter(source, tensor.requires_grad)
    elif issubclass(final, nn.Parameter) and final.__deepcopy__ is not (
        nn.Parameter.__deepcopy__
    ):
        copied = final.__deepcopy__(tensor, memo)
    else:
        copied = _with_storage(tensor, final, memo)
    memo[id(tensor)] = copied
    return copied


def _with_storage(tensor: Tensor, final: type, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor over a copy of its storage, shared through the memo."""
    value = value_of(tensor)
    recording = value.recording
    key = id(value.storage)
    base: Value | None = memo.get(key)
    with recording.lock, no_dispatch():
        if base is None:
            flat = torch.empty(0, dtype=value.meta.dtype, device=_META)
            flat.set_(value.meta.untyped_storage().clone())
            node = append(recording, _clone_storage, (value,))
            base = memo[key] = new_value(recording, node.index, flat, value.device)
            memo[id(memo)] = [*memo.get(id(memo), ()), value.storage]
            node.outs = (base,)
        meta = value.meta.new_empty(0)
        size, stride = tuple(value.meta.size()), value.meta.stride()
        offset = int(value.meta.storage_offset())
        meta.set_(base.meta.untyped_storage(), offset, size, stride)
        geometry = (value.meta.dtype, offset, size, stride)
        node = append(recording, _window, (base, *geometry))
        copied = new_value(recording, node.index, meta, value.device, base.storage)
        node.outs = (copied,)
    result = wrap(copied)
    if final is not Tensor:
        kind = deferred_class(final)
        result = torch.Tensor._make_subclass(kind, copied.meta)
        result.__dict__["_value"] = copied
    if tensor.requires_grad:
        result.requires_grad_()
    result.__dict__.update(copy.deepcopy(user_attributes(tensor), memo))
    return result


def _clone_storage(tensor: Tensor) -> Tensor:
    """Return a flat tensor over a copy of the whole storage."""
    flat = tensor.new_empty(0)
    return flat.set_(tensor.untyped_storage().clone())


def _window(
    base: Tensor,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """Return a tensor over the storage of another one, with its own geometry."""
    tensor = torch.empty(0, dtype=dtype, device=base.device)
    return tensor.set_(base.untyped_storage(), offset, size, stride)


late.to = to
late.deepcopy = deepcopy
late.shallow_copy = shallow_copy

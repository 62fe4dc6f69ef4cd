"""`defer`: give the memory of a real model back, keeping every object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from deferred_init.errors import PlanError, listing
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Value
from deferred_init.record.tensor import (
    deferred_class,
    late,
    make_parameter,
    wrap,
)

__all__ = ["defer"]


def defer(model: nn.Module, refill: Recording | Literal["weights"]) -> None:
    """Turn a real model's tensors back into deferred ones: the same objects, no memory.

    Args:
        model: The model; its parameters and buffers are changed in place, ties,
            attributes and `requires_grad` stay.
        refill: How they will get values again. A recording: the one that the model
            was materialized from (ask `deferred_init.record.recording_of` before),
            whose values then are made again. `"weights"`: the parameters become plain
            meta tensors, to be loaded by `materialize(..., weights=)`; buffers that
            are not part of the state dict stay real, since no weights would refill
            them.

    Raises:
        PlanError: If tensors were not made by that recording, or no longer have
            the shape and type that it gives them; nothing was changed.

    Example:
        >>> import torch, deferred_init as di
        >>> from deferred_init.record import recording_of
        >>> model = di.deferred_init(torch.nn.Linear, 2, 1)
        >>> recording = recording_of(model)
        >>> di.materialize_module(model)
        >>> di.defer(model, recording)
        >>> di.is_deferred(model)
        True
    """
    if refill == "weights":
        _to_meta(model)
        return
    named = dict(_real_tensors(model))
    unfit = [
        name
        for name, tensor in named.items()
        if not _fits(refill.made.get(name), tensor)
    ]
    if unfit:
        raise PlanError(
            f"{len(unfit)} tensors cannot be deferred, because the recording does "
            f"not make them, or not with their shape and type: {listing(unfit)}. "
            "Pass the recording that the model was materialized from, or "
            "refill='weights'.",
            unfit,
        )
    for name, tensor in named.items():
        defer_in_place(tensor, refill.made[name])


def _fits(value: Value | None, tensor: Tensor) -> bool:
    """Whether there is a recorded value of a tensor's shape and type."""
    return value is not None and (value.shape, value.dtype) == (
        tensor.shape,
        tensor.dtype,
    )


def _real_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each real parameter and buffer once, with its name."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            yield name, tensor


def _to_meta(model: nn.Module) -> None:
    """Turn everything that a state dict holds into plain meta tensors."""
    loaded = {id(t) for t in model.state_dict(keep_vars=True).values()}
    metas: dict[int, Tensor] = {}
    for _, tensor in _real_tensors(model):
        if id(tensor) not in loaded:
            continue
        storage = tensor.untyped_storage()
        base = metas.get(storage._cdata)
        if base is None:
            item = tensor.element_size()
            base = torch.empty(
                storage.nbytes() // item, dtype=tensor.dtype, device="meta"
            )
            metas[storage._cdata] = base
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        with torch.no_grad():
            meta = empty.set_(
                base.untyped_storage(),
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
        new = torch.Tensor._make_subclass(type(tensor), meta, tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        torch._C._swap_tensor_impl(tensor, new)


def defer_in_place(tensor: Tensor, value: Value) -> None:
    """Give a real tensor object the contents of a deferred value."""
    final = type(tensor)
    if isinstance(tensor, nn.Parameter):
        new: Tensor = make_parameter(final, wrap(value), tensor.requires_grad)
    else:
        new = torch.Tensor._make_subclass(
            deferred_class(final), value.meta, tensor.requires_grad
        )
        new.__dict__["_value"] = value
    new.__dict__.update(tensor.__dict__)
    tensor.__class__, new.__class__ = type(new), final
    tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, new)


late.defer_in_place = defer_in_place

"""Record an operation of the dispatcher: shapes from meta, values later.

[Note: How one operation is recorded]
The operation runs on the plain meta tensors behind its arguments, which gives the
shapes, strides and aliases of its results; a node with the values in place of the
tensors is appended. An operation whose result is no tensor (`item`, `equal`) and one
that the meta device cannot run (`nonzero`) compute their inputs early, for these
tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.ambient import (
    autocast_at_call,
    refuse_autocast,
    under_default_dtype,
)
from deferred_init.record.append import Draw, append
from deferred_init.record.call import Call
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Place, Value
from deferred_init.record.outputs import fit_outputs, output_metas
from deferred_init.record.paused import no_dispatch, plain_torch
from deferred_init.record.problems import RecordError, user_line
from deferred_init.record.reshape import reshape
from deferred_init.record.schema import OpInfo, op_info
from deferred_init.record.strides import on_cpu
from deferred_init.record.tensor import (
    DeferredTensor,
    late,
    new_value,
    value_of,
    wrap,
)

__all__ = ["dispatch", "record"]

_META = torch.device("meta")


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an operation that has a deferred tensor among its arguments."""
    recording = _recording_in(args) or _recording_in(tuple(kwargs.values()))
    if recording is None:
        raise AssertionError("dispatched without a deferred tensor")
    return record(recording, func, args, kwargs, autocast=autocast_at_call(func))


def _recording_in(items: Any) -> Recording | None:
    """Find the recording of the first deferred tensor in a nest of arguments."""
    for item in items:
        if isinstance(item, DeferredTensor):
            return value_of(item).recording
        if isinstance(item, (tuple, list)):
            found = _recording_in(item)
            if found is not None:
                return found
    return None


def record(
    recording: Recording,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    place: Place | None = None,
    *,
    autocast: tuple[str, ...] = (),
) -> Any:
    """Record one dispatcher operation and return deferred results.

    Args:
        recording: Where to.
        func: The operator overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        place: Where a factory puts its result, if it is one.
        autocast: The types of device for which autocast is on, if the constructor
            has returned.

    Raises:
        RecordError: If it can be neither recorded nor computed early.
    """
    info = op_info(func)
    if info.scalar or info.opaque or _writes_real(info, args, kwargs):
        return _run_early(recording, func, args, kwargs)
    with recording.lock, no_dispatch():
        call = Call(recording, args, kwargs, shapes_only=info.like)
        if info.outputs and _fit(call, info, func, args, kwargs):
            call = Call(recording, args, kwargs, shapes_only=info.like)
        device = _device_of(call, place if info.has_device else None)
        if autocast := autocast or recording.autocast:
            inside = recording.active
            refuse_autocast(func, autocast, device, list(_tensors(call)), inside=inside)
        if info.reshapes:
            return reshape(call, func, args, device)
        if info.fills and isinstance(args[0], DeferredTensor):
            out: Any = call.meta[0]
        else:
            out = _shape(call, info, func, args, kwargs)
            if isinstance(out, Tensor) and out.layout is not torch.strided:
                # No storage to record on: this tensor alone is made for real.
                return _run_early(recording, func, args, kwargs)
        return _append(call, info, func, out, device)


def _device_of(call: Call, place: Place | None) -> torch.device | None:
    """Find where results live, and put a `Place` for every device argument."""
    device = call.inherits.device if call.inherits is not None else None
    asked = call.kwargs.get("device")
    if asked is not None:
        if place is None:  # meta: torch itself wants the device of a deferred tensor
            own = asked == _META and call.inherits is not None
            place = Place(device if own else _normal(call.recording, asked))
        call.kwargs["device"] = place
        call.meta_kwargs["device"] = _META
        return place.device
    if place is not None:
        call.kwargs["device"] = place
        call.meta_kwargs["device"] = _META
        return place.device
    if "device" in call.kwargs:
        del call.kwargs["device"], call.meta_kwargs["device"]
    return device


def _normal(recording: Recording, device: torch.device) -> torch.device | None:
    """Return `None` for the recording's own device, else the device."""
    own = recording.device
    if device.type == own.type and device.index in (None, own.index, own.index or 0):
        return None
    return device


def _fit(
    call: Call, info: OpInfo, func: Any, args: Any, kwargs: dict[str, Any]
) -> bool:
    """Resize what is named by `out=`, and tell whether there was need to."""
    return fit_outputs(
        func,
        call,
        info,
        lambda meta_kwargs: _geometry(call, info, func, args, kwargs, meta_kwargs),
        lambda resize, on: record(call.recording, resize, on, {}),
    )


def _shape(
    call: Call, info: OpInfo, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Return the results of an operation on meta, its outputs themselves."""
    out = _geometry(call, info, func, args, kwargs, call.meta_kwargs)
    return output_metas(call, info) if info.outputs else out


def _geometry(
    call: Call,
    info: OpInfo,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    meta_kwargs: dict[str, Any],
) -> Any:
    """Run an operation on meta; where meta cannot, compute its inputs early."""
    if meta_kwargs.get("generator") is not None:
        meta_kwargs = {**meta_kwargs, "generator": None}
    try:
        with torch._C.DisableTorchFunction():
            return on_cpu(func, call, func(*call.meta, **meta_kwargs))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        if info.draws and "generator" not in info.names:
            raise
    if info.draws:  # for its shape alone
        args = [arg for arg in args if not isinstance(arg, torch.Generator)]
        kwargs = {**kwargs, "generator": torch.Generator()}
    real = _run_early(call.recording, func, args, kwargs)
    if info.mutated == (0,):  # in place: it ran without an error, on a copy
        return call.meta[0]
    return torch.utils._pytree.tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(
            t.size(), t.stride(), dtype=t.dtype, device=_META
        ),
        real,
    )


def _append(
    call: Call, info: OpInfo, func: Any, out: Any, device: torch.device | None
) -> Any:
    """Append the node and wrap its results."""
    recording, draw = call.recording, None
    if info.draws or call.kwargs.get("generator") is not None:
        draw = Draw(call.kwargs.pop("generator", None))
    if not call.tensors and info.has_dtype and isinstance(out, Tensor):
        call.kwargs["dtype"] = out.dtype
    writes = tuple(
        dict.fromkeys(
            value.storage
            for value in info.written(call.args, call.kwargs)
            if isinstance(value, Value)
        )
    )
    overwrites = None
    if info.overwrites and call.args and isinstance(call.args[0], Value):
        overwrites = call.args[0]
        rest = call.args[1:]
        if any(isinstance(a, Value) and a.storage is overwrites.storage for a in rest):
            overwrites = None
    node = append(
        recording,
        under_default_dtype(func, out, list(_tensors(call))),
        call.args,
        call.kwargs or None,
        writes=writes,
        draw=draw,
        device=device,
        overwrites=overwrites,
    )
    outs: list[Value | None] = []
    result = _wrap_results(call, out, node.index, device, outs)
    node.outs = tuple(outs)
    return result


def _wrap_results(
    call: Call,
    out: Any,
    index: int,
    device: torch.device | None,
    outs: list[Value | None],
) -> Any:
    """Turn meta results into deferred tensors, arguments into themselves."""
    if isinstance(out, Tensor):
        owner = call.owners.get(id(out))
        if owner is not None:
            outs.append(None)
            return owner
        key = out.untyped_storage()._cdata
        storage = call.storages.get(key)
        value = new_value(call.recording, index, out, device, storage)
        call.storages[key] = value.storage
        outs.append(value)
        return wrap(value)
    if isinstance(out, (list, tuple)):
        items = [_wrap_results(call, o, index, device, outs) for o in out]
        return items if isinstance(out, list) else tuple(items)
    outs.append(None)
    return out


def _tensors(call: Call) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, as meta sees them."""
    for item in (*call.meta, *call.meta_kwargs.values()):
        for part in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(part, Tensor):
                yield part


def _writes_real(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes to a tensor that is real."""
    if not info.mutated and not info.mutated_names:
        return False
    return any(
        isinstance(item, Tensor) and not isinstance(item, DeferredTensor)
        for item in info.written(args, kwargs)
    )


def _run_early(
    recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation now on the real values of its deferred arguments."""

    def real(item: Any) -> Any:
        if isinstance(item, DeferredTensor):
            return late.early_value(value_of(item))
        if isinstance(item, torch.device):
            return late.early_device(recording)
        if isinstance(item, (list, tuple)):
            return type(item)(real(part) for part in item)
        return item

    with recording.lock:
        real_args = [real(arg) for arg in args]
        real_kwargs = {key: real(arg) for key, arg in kwargs.items()}
        try:
            with plain_torch():
                return func(*real_args, **real_kwargs)
        except NotImplementedError as error:
            raise RecordError(
                f"`{func}` at {user_line()} can neither be recorded nor run: {error}"
            ) from error


late.dispatch = dispatch

"""Give what is named by `out=` the size that an operation will give it.

torch resizes a tensor that is passed as `out=` and does not fit. The resize is recorded
as a node of its own before the operation, as if the constructor had called `resize_`;
the operation itself then writes to a tensor that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.call import Call
from deferred_init.record.schema import OpInfo

__all__ = ["fit_outputs", "output_metas"]

_AS_STRIDED = torch.ops.aten.as_strided_.default
_RESIZE = torch.ops.aten.resize_.default


def output_metas(call: Call, info: OpInfo) -> Any:
    """Return what an operation with `out=` returns: its outputs, as meta sees them."""
    metas = tuple(call.meta_kwargs[name] for name in info.outputs)
    return metas if len(metas) > 1 else metas[0]


def fit_outputs(
    func: Any,
    call: Call,
    info: OpInfo,
    shape: Callable[[dict[str, Any]], Any],
    record: Callable[[Any, tuple[Any, ...]], Any],
) -> bool:
    """Record a resize of each deferred output that does not fit the result.

    Args:
        func: The operator overload.
        call: The operation's arguments.
        info: What is known of the operation.
        shape: Runs the operation for its geometry, with other keyword arguments than
            those of `call`, and returns the outputs.
        record: Records another operation.

    Returns:
        Whether anything was resized, so that the arguments have to be seen again.
    """
    names = [n for n in info.outputs if isinstance(call.meta_kwargs[n], Tensor)]
    trial = {name: torch.empty_like(call.meta_kwargs[name]) for name in names}
    made = shape({**call.meta_kwargs, **trial})
    olds = [call.meta_kwargs[name] for name in info.outputs]
    unfit = [
        index
        for index, (old, new) in enumerate(zip(olds, _items(made), strict=True))
        if id(old) in call.owners and old.shape != new.shape
    ]
    if not unfit:
        return False
    laid_out = _items(_without_outputs(func, info, call, made))
    for index in unfit:
        target, new = call.owners[id(olds[index])], laid_out[index]
        record(_RESIZE, (target, list(new.shape)))
        if target.stride() != new.stride():
            record(_AS_STRIDED, (target, list(new.shape), list(new.stride())))
    return True


def _items(made: Any) -> Any:
    return made if isinstance(made, (list, tuple)) else (made,)


def _without_outputs(func: Any, info: OpInfo, call: Call, made: Any) -> Any:
    """Return what the overload without `out=` makes, or else `made`.

    On meta it knows the strides that a resized output gets; the one with `out=`
    often makes contiguous ones.
    """
    wanted = [name for name in info.names if name not in info.outputs]
    rest = {k: v for k, v in call.meta_kwargs.items() if k not in info.outputs}
    packet = func._overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [arg.name for arg in overload._schema.arguments] == wanted:
            try:
                return overload(*call.meta, **rest)
            except (RuntimeError, NotImplementedError):  # meta cannot run it
                return made
    return made

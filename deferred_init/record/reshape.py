"""Record operations that change the geometry of a tensor in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.record.append import append
from deferred_init.record.call import Call
from deferred_init.record.tensor import new_value, value_of, wrap

__all__ = ["reshape"]


def reshape(call: Call, func: Any, args: Any, device: torch.device | None) -> Any:
    """Record an operation that changes the geometry of its first argument."""
    target = args[0]
    old = value_of(target)
    view = torch.ops.aten.alias.default(old.meta)
    with torch._C.DisableTorchFunction():
        func(view, *call.meta[1:], **call.meta_kwargs)
    node = append(
        call.recording,
        _OnAlias(func),
        call.args,
        call.kwargs or None,
        writes=(old.storage,),
    )
    storage = call.storages.get(view.untyped_storage()._cdata)
    value = new_value(call.recording, node.index, view, device, storage)
    node.outs = (value,)
    torch._C.TensorBase.data.__set__(target, wrap(value))  # type: ignore[attr-defined]
    target.__dict__["_value"] = value
    return target


class _OnAlias:
    """Runs a geometry-changing operation on an alias of its first argument."""

    __slots__ = ("__name__", "func")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.__name__ = str(func)

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        alias: Tensor = torch.ops.aten.alias.default(first)
        self.func(alias, *args, **kwargs)
        return alias

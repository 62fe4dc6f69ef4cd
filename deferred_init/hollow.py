"""Tensors without memory that do not say so, to see what init code would write.

Since torch 2.13 the functions of `torch.nn.init` that read values or have no kernels on
meta (`trunc_normal_`, `orthogonal_`, `sparse_`, `dirac_`) return at once if
`tensor.is_meta`, and init methods of users often do the same. A hollow tensor tells
the former yes and counts as filled, since all of them fill; it tells the latter no.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.aliases import is_recorded, is_sharded

__all__ = ["hollow"]


def hollow(tensor: Tensor) -> Tensor:
    """Return a hollow tensor; over the same meta storage if there is one."""
    if is_recorded(tensor):
        # Its own class would record what init code is only tried with.
        data = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
    elif tensor.is_meta and not is_sharded(tensor):
        data = tensor.data  # which counts its writes apart from those of the tensor
    else:
        data = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    if isinstance(tensor, nn.Parameter):
        return _HollowParameter(data, requires_grad=tensor.requires_grad)
    return data.as_subclass(_HollowTensor)


def _torch_function(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Run an operation as on plain tensors; what it makes is hollow too."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
        if func is Tensor.detach and cls is _HollowParameter:
            return result.as_subclass(cls)  # as `nn.Parameter(parameter)` wants it
        if type(result) is Tensor:
            return _as_hollow(result)
        if type(result) in (list, tuple):
            return type(result)(_as_hollow(item) for item in result)
    return result


def _as_hollow(value: Any) -> Any:
    if type(value) is Tensor and value.is_meta:
        return value.as_subclass(_HollowTensor)
    return value


def _is_meta(tensor: Tensor) -> bool:
    """Answer "is it on meta?"; to torch's own init functions, by being filled."""
    if sys._getframe(1).f_globals.get("__name__") != nn.init.__name__:
        return False
    tensor.data.zero_()  # not counted: that function will write nothing
    return True


class _HollowTensor(Tensor):
    is_meta = property(_is_meta)
    __torch_function__: Any = classmethod(_torch_function)


class _HollowParameter(nn.Parameter):
    is_meta = property(_is_meta)
    __torch_function__: Any = classmethod(_torch_function)

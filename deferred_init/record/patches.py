"""What is replaced in torch while a constructor is recorded, and put back after.

None of these can be reached by a mode: `nn.Parameter.__new__` decides on the exact type
of its argument, a lazy parameter has no data to record, a `torch.nn.init` function
loops over values, a file is rebuilt into storages, and a new thread has no modes. Every
replacement does what the original does for anything that is not being recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from deferred_init.record.append import Draw
from deferred_init.record.external import external_classes, stand_aside
from deferred_init.record.fills import record_fill
from deferred_init.record.paused import plain_torch
from deferred_init.record.tensor import DeferredTensor, final_class, make_parameter

__all__ = ["Patches", "active"]

_lock = threading.Lock()
_depth = 0
_undo: list[Callable[[], None]] = []


class _Active(threading.local):
    """What is being recorded in this thread.

    Attributes:
        recorder: Opens the modes of the recording, in other threads too; None where
            nothing is recorded.
    """

    recorder: Any = None


active = _Active()
_parameter_new = nn.Parameter.__new__
_trunc_normal = torch.nn.init._no_grad_trunc_normal_
_rebuild_tensor = torch._utils._rebuild_tensor
_lazy_mixin: Any = vars(parameter)["UninitializedTensorMixin"]
_lazy_materialize = _lazy_mixin.materialize
_storage_copy = torch.UntypedStorage.copy_
_initial_seed = torch.initial_seed
_thread_start = threading.Thread.start


def _new_parameter(
    cls: type, data: Any = None, requires_grad: bool = True, **kwargs: Any
) -> Any:
    """Stand in for `nn.Parameter.__new__`."""
    if data is None and active.recorder is not None:
        data = torch.empty(0)
    if isinstance(data, DeferredTensor) and not kwargs:
        own = final_class(data)
        if own is Tensor or issubclass(own, nn.Parameter):
            return make_parameter(cls, data, requires_grad)
        # As torch does it: a tensor of another class stays one, with a mark.
        result = make_parameter(own, data, requires_grad)
        vars(result)["_is_param"] = True
        return result
    return _parameter_new(cls, data, requires_grad, **kwargs)


def _uninitialized(original: Any) -> Any:
    """Stand in for the `__new__` of lazy parameters, which have no data: real."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        with plain_torch():
            return original(cls, *args, **kwargs)

    return new


def _give_shape(
    tensor: Any,
    shape: tuple[int, ...],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Stand in for `materialize` of lazy tensors: the object becomes a recorded one."""
    if active.recorder is None:
        _lazy_materialize(tensor, shape, device, dtype)
        return
    if device is None and tensor.data.device.type != "cpu":
        device = tensor.data.device
    new: Tensor = torch.empty(shape, device=device, dtype=dtype or tensor.data.dtype)
    if isinstance(tensor, UninitializedParameter):
        new = make_parameter(nn.Parameter, new, tensor.requires_grad)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)


def _truncated_normal(
    tensor: Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Stand in for the loop of `nn.init.trunc_normal_`: one node."""
    if isinstance(tensor, DeferredTensor):
        return record_fill(tensor, _trunc_normal, (mean, std, a, b), Draw(generator))
    return _trunc_normal(tensor, mean, std, a, b, generator=generator)


def _rebuild(*args: Any, **kwargs: Any) -> Any:
    """Stand in for the function that makes tensors from a file's storages."""
    with plain_torch():
        return _rebuild_tensor(*args, **kwargs)  # type: ignore[no-untyped-call]


def _copy_storage(storage: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `UntypedStorage.copy_`, which makes tensors of the storages."""
    with plain_torch():
        return _storage_copy(storage, *args, **kwargs)


def _seed_seen() -> int:
    """Stand in for `torch.initial_seed`: what was done with it is for that seed."""
    if active.recorder is not None:
        active.recorder.recording.looked_at_random = True
    return _initial_seed()


def _start(thread: threading.Thread) -> None:
    """Stand in for `Thread.start`: the new thread records too."""
    recorder = active.recorder
    if recorder is not None:
        run = thread.run

        def recorded() -> None:
            with recorder.modes():
                run()

        thread.run = recorded  # type: ignore[method-assign]
    _thread_start(thread)


def _set(owner: Any, name: str, new: Any, old: Any) -> None:
    """Replace an attribute and remember how to put it back."""
    own = name in vars(owner)
    setattr(owner, name, new)
    if own:
        _undo.append(lambda: setattr(owner, name, old))
    else:
        _undo.append(lambda: delattr(owner, name))


class Patches:
    """Context in which the replacements are in place; contexts may overlap."""

    def __enter__(self) -> None:
        global _depth
        with _lock:
            _depth += 1
            if _depth > 1:
                return
            new = vars(nn.Parameter)["__new__"]
            _set(nn.Parameter, "__new__", staticmethod(_new_parameter), new)
            for lazy in (UninitializedParameter, UninitializedBuffer):
                old = vars(lazy)["__new__"]
                new_lazy = _uninitialized(old.__func__)
                _set(lazy, "__new__", staticmethod(new_lazy), old)
            _set(_lazy_mixin, "materialize", _give_shape, _lazy_materialize)
            init = torch.nn.init
            _set(init, "_no_grad_trunc_normal_", _truncated_normal, _trunc_normal)
            _set(torch._utils, "_rebuild_tensor", _rebuild, _rebuild_tensor)
            _set(torch.UntypedStorage, "copy_", _copy_storage, _storage_copy)
            for owner in (torch, torch.random):
                _set(owner, "initial_seed", _seed_seen, _initial_seed)
            _set(threading.Thread, "start", _start, _thread_start)
            for cls in external_classes():
                init_of = vars(cls)["__init__"]
                _set(cls, "__init__", stand_aside(init_of, active), init_of)

    def __exit__(self, *exc: object) -> None:
        global _depth
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _undo:
                    _undo.pop()()

"""What surrounds a recorded operation and decides about its dtypes.

That is the default dtype, which is kept for the replay, and autocast, which is refused.
A replay happens later, in other surroundings.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from deferred_init.default_dtype import default_dtype
from deferred_init.record.problems import RecordError, user_line

__all__ = ["autocast_at_call", "autocast_on", "refuse_autocast", "under_default_dtype"]

_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# What `conv2d` and `scaled_dot_product_attention` have become when they are recorded.
_INNER = frozenset(
    {
        "aten::convolution",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    }
)


class _UnderDefaultDtype:
    """Calls an operator under the default dtype that was set when it was recorded."""

    __slots__ = ("__name__", "dtype", "func")

    def __init__(self, func: Any, dtype: torch.dtype) -> None:
        self.func = func
        self.dtype = dtype
        self.__name__ = str(getattr(func, "__name__", func))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.get_default_dtype() == self.dtype:
            return self.func(*args, **kwargs)
        with default_dtype(self.dtype):
            return self.func(*args, **kwargs)


def under_default_dtype(func: Any, out: Any, inputs: list[Tensor]) -> Any:
    """Return what to record for an operator, given its result and tensor arguments.

    Floating-point results of integers (`torch.arange(8) / 8`) have the default dtype,
    which neither the operator nor its arguments say.
    """
    if not isinstance(out, Tensor) or not _inexact(out) or not inputs:
        return func
    if any(map(_inexact, inputs)):
        return func
    return _UnderDefaultDtype(func, torch.get_default_dtype())


def autocast_on() -> tuple[str, ...]:
    """Return the types of device for which autocast is on."""
    return tuple(filter(torch.is_autocast_enabled, _AUTOCAST))


def autocast_at_call(func: Any) -> tuple[str, ...]:
    """Return it for the call that led to an operator, if it knows the operator.

    To be called from a `__torch_dispatch__`. There autocast is off: the dispatcher
    passed it by on the way.
    """
    if not _is_autocasted(func):
        return ()
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return autocast_on()


def refuse_autocast(
    func: Any,
    autocast: tuple[str, ...],
    device: torch.device | None,
    inputs: list[Tensor],
    *,
    inside: bool,
) -> None:
    """Refuse an operator that autocast would have given other inputs.

    Deferred tensors are on meta, where autocast does nothing.

    Args:
        func: The operator.
        autocast: The types of device for which autocast is on.
        device: Where the operator runs; None is the device of the replay, any.
        inputs: Its tensor arguments.
        inside: Whether the constructor is running.

    Raises:
        RecordError: If autocast knows the operator.
    """
    if device is not None:
        autocast = tuple(each for each in autocast if each == device.type)
    found = next((each for each in autocast if _autocasts(func, each)), None)
    if found is not None and any(map(_inexact, inputs)):
        first = "Leave it before `deferred_init`" if inside else "Materialize first"
        raise RecordError(
            f"`{func}` at {user_line()} is computed under autocast, which cannot be "
            f"recorded: expected autocast to be off for {found}. {first}, "
            f'or put `torch.autocast("{found}", enabled=False)` around that line'
        )


@functools.cache
def _is_autocasted(func: Any) -> bool:
    return any(_autocasts(func, each) for each in _AUTOCAST)


@functools.cache
def _autocasts(func: Any, device_type: str) -> bool:
    if func._schema.name in _INNER:
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), _AUTOCAST[device_type]
    )


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

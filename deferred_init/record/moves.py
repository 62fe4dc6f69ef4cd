"""Moves of tensors to a device that need not exist, or to where another tensor is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.capture import constant
from deferred_init.record.graph import Recording
from deferred_init.record.tensor import DeferredTensor

__all__ = ["move"]

_META = torch.device("meta")


def move(
    recording: Recording,
    normal: Callable[[torch.device], torch.device | None],
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Call `Tensor.to`, `cuda` or `type_as` while a constructor is recorded.

    Args:
        recording: Where a move of a real tensor is recorded.
        normal: Returns None for the recording's own device, else the device.
        func: The method.
        args: The tensor and the method's positional arguments.
        kwargs: Its keyword arguments.
    """
    tensor, *rest = args
    other = rest[0] if rest else kwargs.get("tensor", kwargs.get("other"))
    if func is not torch.Tensor.cuda and isinstance(other, Tensor):
        # What it says of itself counts, and not where torch finds it: on meta.
        options = {k: v for k, v in kwargs.items() if k not in ("tensor", "other")}
        return move(
            *(recording, normal, torch.Tensor.to),
            (tensor, other.device, other.dtype, *rest[1:]),
            options,
        )
    if isinstance(tensor, DeferredTensor):
        return func(*args, **kwargs)
    if func is torch.Tensor.cuda:
        target: Any = torch.device("cuda")
    else:
        options = {k: v for k, v in kwargs.items() if k != "copy"}
        target = torch._C._nn._parse_to(*rest[:3], **options)[0]
    if target is None or target.type in ("cpu", "meta") or tensor.device == _META:
        return func(*args, **kwargs)
    moved: Tensor = constant(recording, tensor.detach(), normal(target))
    return moved if func is torch.Tensor.cuda else moved.to(*rest, **kwargs)

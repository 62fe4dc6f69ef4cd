"""Functions of torch that take another way for recorded tensors than for others.

`torch.linalg.eigvalsh` computes the eigenvectors too where it sees a subclass of
Tensor, whose operators might want them; LAPACK then takes another way, to other bits.
So these functions are recorded as they are called, not as the operators that they
become. Where a gradient is wanted, torch computes the vectors in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.append import append
from deferred_init.record.call import Call
from deferred_init.record.graph import Recording
from deferred_init.record.paused import no_dispatch
from deferred_init.record.tensor import DeferredTensor, new_value, wrap

__all__ = ["WHOLE", "record_whole"]

WHOLE: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cond),
        *(torch.linalg.norm, torch.linalg.matrix_norm, torch.linalg.matrix_rank),
        *(torch.norm, torch.nuclear_norm, torch.Tensor.norm),
    }
)
"""The functions; each returns one new tensor."""


def record_whole(
    recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record a call of one of the functions as one node, where one can.

    Args:
        recording: Where to.
        func: One of `WHOLE`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if (
        not any(isinstance(tensor, DeferredTensor) for tensor in tensors)
        or wants_gradient
        or recording.autocast
        or kwargs.get("out") is not None
    ):
        return func(*args, **kwargs)
    with recording.lock, no_dispatch():
        call = Call(recording, args, kwargs, shapes_only=False)
        with torch._C.DisableTorchFunction():
            out = func(*call.meta, **call.meta_kwargs)
        device = None if call.inherits is None else call.inherits.device
        node = append(recording, func, call.args, call.kwargs or None, device=device)
        value = new_value(recording, node.index, out, device)
        node.outs = (value,)
        return wrap(value)

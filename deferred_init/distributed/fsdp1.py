"""`param_init_fn` for FSDP1, which materializes its units by itself, one by one.

[Note: FSDP1's order]
FSDP1 wraps inner units first and asks for each module of a unit separately. That is
not the order of construction, so for a model on meta whatever draws from a running
generator gives other values than eager construction. A recording knows its place:
each tensor of a recorded model can be made alone and has the bits of eager. Models on
meta get right shapes and distributions, in FSDP1's order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from deferred_init.api import materialize
from deferred_init.record import is_deferred, materialize_module
from deferred_init.validate import device_or_default

__all__ = ["param_init_fn"]


def param_init_fn(
    recipe: object = None, *, device: torch.device | str | int | None = None
) -> Callable[[nn.Module], nn.Module]:
    """Return a function for `FullyShardedDataParallel(..., param_init_fn=)`.

    Args:
        recipe: As for `materialize`; for recorded models only None.
        device: Where the units are made before they are sharded; by default the
            current CUDA device, or the CPU where there is none.

    Returns:
        A function that gives memory and values to all that is deferred in a module, and
        returns the module, from which accelerate takes the tied parameters.

    Example:
        >>> import torch, deferred_init as di
        >>> layer = torch.nn.Linear(4, 2, device="meta")
        >>> di.param_init_fn(device="cpu")(layer) is layer
        True
        >>> layer.weight.device.type
        'cpu'
    """

    def fill(module: nn.Module) -> nn.Module:
        target = device_or_default(device)
        if recipe is None and is_deferred(module):
            materialize_module(module, device=target)
        else:
            materialize(module, target, recipe)
        return module

    return fill

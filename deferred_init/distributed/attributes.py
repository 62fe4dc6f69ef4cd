"""Carries Python attributes of parameters over to the objects that replace them.

`fully_shard` and `parallelize_module` put new objects in the place of parameters, which
have none of the attributes of the old ones; nothing that comes later can know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from deferred_init.aliases import has_own_dispatch

__all__ = ["attributes_kept"]

_OF_WRAPPERS = ("_fsdp", "_is_param")


@contextmanager
def attributes_kept(*models: nn.Module) -> Iterator[None]:
    """Let parameters keep their attributes while the body replaces the objects.

    A replacement gets what it has not itself: `tensor_model_parallel`,
    `sequence_parallel`, your own. Works for real models, models on meta and recorded
    ones, whose attributes `materialize` would carry over from the constructor anyway.

    Args:
        models: The models whose parameters are replaced.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.weight.sequence_parallel = True
        >>> with attributes_kept(model):
        ...     model.weight = nn.Parameter(model.weight.detach())
        >>> model.weight.sequence_parallel
        True
    """
    held = [
        (module, name, param)
        for model in models
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    yield
    for module, name, old in held:
        new = module._parameters.get(name)
        if new is None or new is old:
            continue
        for attribute, value in _carried(old).items():
            if attribute not in new.__dict__:
                setattr(new, attribute, value)


def _carried(tensor: Tensor) -> dict[str, Any]:
    """Return what a user put on a tensor, without what its class keeps there."""
    own = getattr(type(tensor), "__carried_attributes__", None)
    attributes = dict(tensor.__dict__ if own is None else own(tensor))
    if own is None and has_own_dispatch(type(tensor)):
        # A class that keeps its data there does so under names of its own.
        attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith(_OF_WRAPPERS)
        and getattr(value, "__self__", None) is not tensor
    }

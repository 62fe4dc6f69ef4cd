"""The models that a verb is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from deferred_init.object_contents import reader_of

__all__ = ["Models", "as_models"]

Models = nn.Module | Sequence[nn.Module]

_MAX_NAMES = 10


def as_models(model: Models) -> tuple[nn.Module, ...]:
    """Return the models as a tuple.

    Raises:
        TypeError: If something in it is not an `nn.Module`; names the modules that it
            holds.
    """
    if isinstance(model, nn.Module):
        return (model,)
    several = isinstance(model, Iterable) and not isinstance(model, (Mapping, str))
    models: tuple[Any, ...] = tuple(model) if several else (model,)
    wrong = [item for item in models if not isinstance(item, nn.Module)]
    if wrong or not models:
        found = ", ".join(map(_described, wrong)) or "an empty sequence"
        raise TypeError(f"expected an nn.Module or a sequence of them, got {found}")
    return models


def _described(item: object) -> str:
    """Return the class of something that is no module, and the modules in it."""
    kind = type(item).__name__
    _, items = reader_of(type(item))(item)
    held = [(label, value) for _, label, value in items if isinstance(value, nn.Module)]
    if not held:
        return kind
    names = [f"`{name}` (`{type(value).__name__}`)" for name, value in held]
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"... and {len(names) - _MAX_NAMES} more"]
    return f"{kind} (pass the modules in it, as a list: {', '.join(names)})"

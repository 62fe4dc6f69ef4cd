"""Reads attributes of modules that answer for names they do not have.

A user's `__getattr__` may raise anything, or forward to a module that it wraps; and a
property may not work before training. Looking must not run either.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["own_attribute"]

_TABLES = ("_parameters", "_buffers", "_modules")


def own_attribute(module: nn.Module, name: str, default: Any = None) -> Any:
    """Return what a module itself holds under a name; else the default.

    Looks where `nn.Module` stores things, then at plain class attributes.

    Example:
        >>> own_attribute(nn.Linear(2, 3), "in_features")
        2
    """
    held = vars(module)
    if name in held:
        return held[name]
    for table in _TABLES:
        if name in held[table]:
            return held[table][name]
    for base in type(module).__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return default if hasattr(found, "__get__") else found
    return default

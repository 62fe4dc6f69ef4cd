"""Find the function that the command line was pointed at, and build its model."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deferred_init.record import deferred_init
from deferred_init.spelling import closest

__all__ = ["TargetError", "build_deferred", "built", "load_function"]


class TargetError(ValueError):
    """The target on the command line names nothing that can be used."""


def load_function(target: str) -> Callable[[], Any]:
    """Import `package.module:function`; the current folder is searched as well.

    Raises:
        TargetError: Not of that form, no such module, no such function.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise TargetError(
            f"a target has the form package.module:function, found {target!r}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but lacks an import of its own is another matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(f"no module is called {module_name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [
            each
            for each, value in vars(module).items()
            if callable(value) and not each.startswith("_")
        ]
        raise TargetError(
            f"{module_name} has no function {name!r}; {closest(name, public)}"
        )
    found: Callable[[], Any] = function
    return found


def build_deferred(function: Callable[[], Any]) -> Any:
    """Call a constructor so that its model takes no memory."""
    return deferred_init(function)


def built(result: Any) -> tuple[list[nn.Module], list[Optimizer]]:
    """Sort what a target returned into models and optimizers.

    Args:
        result: A model, an optimizer, or a sequence of those, nested or not.

    Raises:
        TargetError: There is no model in it, or something else is.
    """
    models: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    strangers: list[str] = []
    pending = [result]
    while pending:
        item = pending.pop(0)
        if isinstance(item, nn.Module):
            models.append(item)
        elif isinstance(item, Optimizer):
            optimizers.append(item)
        elif isinstance(item, Sequence) and not isinstance(item, str):
            pending[:0] = item
        else:
            strangers.append(type(item).__name__)
    if strangers or not models:
        found = ", ".join(strangers) or "no model"
        raise TargetError(
            f"the function must return a model, or models and optimizers, found {found}"
        )
    return models, optimizers

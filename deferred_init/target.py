"""Find the function that the command line was pointed at, and build its model."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deferred_init.record import deferred_init
from deferred_init.spelling import closest
from deferred_init.te.on_meta import te_on_meta

__all__ = ["TargetError", "build_deferred", "built", "load_target"]

_MAX_CONFIG_BYTES = 10_000_000


class TargetError(ValueError):
    """The target on the command line names nothing that can be used."""


def _load_function(target: str) -> Callable[[], Any]:
    """Import `package.module:function`; the current folder is searched as well.

    Raises:
        TargetError: Not of that form, no such module, no such function, or one that
            needs arguments.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise TargetError(
            "a target has the form package.module:function, found "
            f"{target!r}; it may also be a folder of Hugging Face's with a config.json"
        )
    if module_name.endswith(".py") or module_name.startswith("."):
        stem = Path(module_name).stem
        raise TargetError(
            f"{module_name!r} is no name of a module; a file is given as its module, "
            f"{stem}:{name}, in its own folder"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but lacks an import of its own is another matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"no module is called {module_name!r}, here or among what is installed; "
            "start in the folder that holds it, or install its package"
        ) from error
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
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TargetError(
            f"{target} cannot be called without arguments: {error}; name a function "
            "that takes none, such as one that calls it with yours"
        ) from error
    except ValueError:  # one in C that does not tell
        pass
    found: Callable[[], Any] = function
    return found


def load_target(target: str) -> Callable[[], Any]:
    """Return a constructor for whatever a target names.

    Args:
        target: `package.module:function`, a Hugging Face folder, or its `config.json`.

    Raises:
        TargetError: It names nothing that can be used.
    """
    path = Path(target)
    if path.is_dir() or path.suffix == ".json":
        return _from_config(path / "config.json" if path.is_dir() else path)
    return _load_function(target)


def _from_config(path: Path) -> Callable[[], nn.Module]:
    """Return a constructor for the model that a Hugging Face config describes."""
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r}")
    try:
        import transformers
    except ImportError as error:
        raise TargetError(
            f"{str(path)!r} needs transformers, which could not be imported ({error}); "
            'install it with pip install "deferred-init[hf]"'
        ) from error
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise TargetError(f"{str(path)!r} has more than {_MAX_CONFIG_BYTES:,} bytes")
    try:
        # Without the word no code beside the file is run, nor is anybody asked.
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # wrong files fail in every way there is
        reason = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"{str(path)!r} is no model configuration: {reason}"
        ) from error
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        # The name is data: it may choose a model, and call nothing else.
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return lambda: found(config)
    return lambda: transformers.AutoModel.from_config(config)


def build_deferred(function: Callable[[], Any]) -> Any:
    """Call a constructor so that its model takes no memory.

    Transformer Engine's constructors demand a GPU; where there is none they are told
    that there is, and build on meta.
    """
    missing_gpu = "transformer_engine" in sys.modules and not torch.cuda.is_available()
    with te_on_meta() if missing_gpu else nullcontext():
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

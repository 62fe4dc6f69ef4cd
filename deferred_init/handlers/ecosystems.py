"""The handlers of each package, loaded when that package is already imported.

A model that uses a package must have imported it, so nothing is imported in vain.
"""

from __future__ import annotations

import importlib
import sys

from deferred_init.errors import PlanError

__all__ = ["load_handlers"]

_ECOSYSTEMS = {
    "torch": (
        "deferred_init.handlers.torch_nn",
        "deferred_init.handlers.torch_nn_containers",
        "deferred_init.handlers.parametrized",
        "deferred_init.handlers.averaged_model",
        "deferred_init.handlers.reset_methods",
        "deferred_init.handlers.plain",
        "deferred_init.handlers.recipe_rules",
    ),
    "transformers.modeling_utils": (
        "deferred_init.handlers.hf_constructor",
        "deferred_init.handlers.hf",
        "deferred_init.handlers.hf_modules",
    ),
    "transformer_engine.pytorch": (
        "deferred_init.handlers.te_modules",
        "deferred_init.handlers.te_attention",
        "deferred_init.handlers.te_ops",
        "deferred_init.handlers.te_aliases",
        "deferred_init.handlers.quantized",
        "deferred_init.te.audit_te",
    ),
    "torch.distributed.tensor": (
        "deferred_init.handlers.dtensor",
        "deferred_init.distributed.audit_ranks",
    ),
    "deferred_init.record": ("deferred_init.handlers.recorded",),
}
_loaded: set[str] = set()


def load_handlers() -> None:
    """Import the handlers of every ecosystem that is already imported.

    Raises:
        PlanError: The installed release lacks something that they need. The next call
            tries again.
    """
    for package, modules in _ECOSYSTEMS.items():
        if package in _loaded or package not in sys.modules:
            continue
        for module in modules:
            try:
                importlib.import_module(module)
            except (ImportError, AttributeError) as error:
                raise PlanError(
                    f"`{module}`, which serves the models of `{package}`, could not be "
                    f"imported ({error}); the installed release may not be one that is "
                    "supported: `deferred-init doctor` says what it lacks"
                ) from error
        _loaded.add(package)

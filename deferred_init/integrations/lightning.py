"""For Lightning's `configure_model`, which runs on every rank once devices are known.

[Note: Where Lightning would materialize]
Its strategies call `reset_parameters` on whatever is on meta after `configure_model`,
module by module, and only warn of what has none. So `configure_model` shards, and then
fills, by itself; afterwards nothing is on meta. Lightning builds the optimizers later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deferred_init.aliases import has_deferred
from deferred_init.api import materialize
from deferred_init.report import Report

__all__ = ["configure_model"]


def configure_model(
    module: Any,
    *names: str,
    shard: Callable[[nn.Module], Any] | None = None,
    recipe: object = None,
    **options: Any,
) -> Report | None:
    """Materialize models of a `LightningModule`, in its `configure_model`.

    Lightning calls that hook again for every `fit`, `validate` and `test`; a model that
    has memory already is left alone.

    Args:
        module: The `LightningModule`; the device is that of its trainer.
        *names: Attributes that hold the models; without any, the whole module.
        shard: Called with each model while it has no memory, to apply `fully_shard`
            or tensor parallelism.
        recipe: As in `materialize`.
        **options: As in `materialize`: `seed`, `rng`, `weights`, ...

    Returns:
        The report, or None if there was nothing to do.

    Raises:
        RuntimeError: The module is not attached to a trainer.
        PlanError: As in `materialize`.

    Example:
        >>> class Lit(LightningModule):  # doctest: +SKIP
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = di.deferred_init(build)
        ...
        ...     def configure_model(self):
        ...         configure_model(self, "model", seed=0)
    """
    models = [getattr(module, name) for name in names] or [module]
    if not has_deferred(models):
        return None
    device = module.trainer.strategy.root_device
    if shard is not None:
        for model in models:
            shard(model)
    return materialize(models, device, recipe, **options)

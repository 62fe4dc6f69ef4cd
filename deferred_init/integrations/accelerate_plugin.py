"""A drop-in `Accelerator` that prepares models which have no memory yet.

[Note: The order of preparation]
Accelerate places, wraps and shards in `prepare`, and what it does to a model on meta
is wrong in each case: `.to(device)` raises, DDP broadcasts nothing, and under FSDP2 it
finds the optimizer's parameters by `data_ptr()`, which on meta is 0 for all, so that
every group ends up with the last parameter. Here the order is: split for tensor
parallelism, or convert to Transformer Engine; then, for one process and DDP,
materialize and let accelerate go on with a real model; for FSDP2, let accelerate shard
on meta, point the optimizers to the sharded parameters by name, and materialize the
shards; for FSDP1, materialize unit by unit. What torch.compile wraps is compiled at its
first forward, after all of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator as _Accelerator
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn
from torch.optim import Optimizer

from deferred_init.aliases import has_deferred
from deferred_init.distributed.fsdp1 import param_init_fn
from deferred_init.errors import PlanError
from deferred_init.integrations.accelerate_target import (
    DeferredInitPlugin,
    Target,
    compute,
)
from deferred_init.integrations.optimizer_names import plain
from deferred_init.integrations.te_conversion import convert_to_te
from deferred_init.report import Report

__all__ = ["Accelerator", "DeferredInitPlugin", "attach"]


class _DeferredPrepare:
    """What is put in front of an `Accelerator` class."""

    _deferred_init: DeferredInitPlugin
    deferred_init_reports: list[Report]

    @property
    def fp8_backend(self) -> Any:
        """Accelerate's FP8 backend; none where the plugin's recipe does that work."""
        plugin = vars(self).get("_deferred_init")
        recipe = None if plugin is None else plugin.resolved_recipe()
        if recipe is not None and recipe.te_recipe is not None:
            return FP8BackendType.NO
        return super().fp8_backend  # type: ignore[misc]

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare as accelerate does; models without memory are materialized.

        Args:
            *args: As in `accelerate.Accelerator.prepare`.
            device_placement: As there.

        Raises:
            PlanError: A model cannot be materialized; nothing was changed but
                conversions.
        """
        models = [arg for arg in args if _is_new_model(arg)]
        optimizers = [plain(arg) for arg in args if isinstance(arg, Optimizer)]
        go_on = super().prepare  # type: ignore[misc]
        if not models:
            return go_on(*args, device_placement=device_placement)
        sources = _real_ranks(models)
        here = Target(self, models, optimizers)
        if sources == []:
            here.split()
        _convert(models, self._deferred_init)
        if sources is None:
            compute(models, self._deferred_init)
            return go_on(*args, device_placement=device_placement)
        if sources:  # real on some ranks only
            here.materialize(broadcast_from=sources[0])
        elif here.kind == "fsdp2":
            return here.shard_then_materialize(go_on, args, device_placement)
        elif here.kind == "fsdp1":
            here.plan()
            compute(models, self._deferred_init)
            with _materialized_by_unit(self):
                return go_on(*args, device_placement=device_placement)
        else:
            here.materialize()
        compute(models, self._deferred_init)
        return go_on(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare one model as accelerate does; materialize it if it has no memory."""
        here = Target(self, [model], [])
        if here.kind == "whole" and has_deferred([model]):
            _convert([model], self._deferred_init)
            here.materialize()
            compute([model], self._deferred_init)
        return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]


class Accelerator(_DeferredPrepare, _Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` with one argument more.

    Args:
        *args: As for `accelerate.Accelerator`.
        deferred_init: What to do with models without memory.
        **kwargs: As for `accelerate.Accelerator`.

    Attributes:
        deferred_init_reports: The report of every materialization so far.

    Example:
        >>> import torch, deferred_init as di
        >>> from deferred_init.integrations.accelerate_plugin import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = di.deferred_init(torch.nn.Linear, 4, 2)
        >>> model = accelerator.prepare(model)
        >>> model.weight.device.type
        'cpu'
    """

    def __init__(
        self,
        *args: Any,
        deferred_init: DeferredInitPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        # First: accelerate's constructor already asks which FP8 backend there is.
        self._deferred_init = deferred_init or DeferredInitPlugin()
        self.deferred_init_reports = []
        super().__init__(*args, **kwargs)


def attach(accelerator: Any, plugin: DeferredInitPlugin | None = None) -> Any:
    """Make an existing accelerator prepare models without memory.

    The object stays the same and gets a class in front of its own, as `fully_shard`
    does with modules; attaching again replaces the plugin.

    Args:
        accelerator: An `accelerate.Accelerator`, or of a subclass.
        plugin: What to do with models without memory.

    Returns:
        The same accelerator.

    Raises:
        TypeError: It is no accelerator.
    """
    if not isinstance(accelerator, _Accelerator):
        raise TypeError(
            "expected an accelerate.Accelerator, found "
            f"{type(accelerator).__name__}; pass the object on which the script calls "
            "`prepare`"
        )
    if not isinstance(accelerator, _DeferredPrepare):
        cls = type(accelerator)
        accelerator.__class__ = type(cls.__name__, (_DeferredPrepare, cls), {})
        accelerator.deferred_init_reports = []
    accelerator._deferred_init = plugin or DeferredInitPlugin()
    return accelerator


def _is_new_model(item: object) -> bool:
    prepared = getattr(item, "_is_accelerate_prepared", False)
    return isinstance(item, nn.Module) and not prepared


def _real_ranks(models: Sequence[nn.Module]) -> list[int] | None:
    """Return the ranks whose models are real, or None if they are real on all."""
    deferred = has_deferred(models)
    if not (dist.is_available() and dist.is_initialized()):
        return [] if deferred else None
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, deferred)
    if not any(answers):
        return None
    return [rank for rank, answer in enumerate(answers) if not answer]


def _convert(models: Sequence[nn.Module], plugin: DeferredInitPlugin) -> None:
    conversion = plugin.conversion()
    if conversion is not None:
        for model in models:
            convert_to_te(model, conversion)


@contextmanager
def _materialized_by_unit(accelerator: Any) -> Iterator[None]:
    """Let FSDP1 materialize each unit before it flattens it."""
    plugin: DeferredInitPlugin = accelerator._deferred_init
    unfit = [name for name in ("weights", "seed") if getattr(plugin, name) is not None]
    usual = (("rng", "eager"), ("verify", "fast"))
    unfit += [
        f"{name}={getattr(plugin, name)!r}"
        for name, value in usual
        if getattr(plugin, name) != value
    ]
    if unfit:
        raise PlanError(
            "FSDP1 materializes its units one by one, which leaves no place for "
            f"{', '.join(unfit)}; use FSDP2 (`fsdp_version=2`), or set the "
            "seed before the model is built"
        )
    fsdp = accelerator.state.fsdp_plugin
    before = fsdp.param_init_fn
    fsdp.param_init_fn = param_init_fn(
        plugin.resolved_recipe(), device=accelerator.device
    )
    try:
        yield
    finally:
        fsdp.param_init_fn = before

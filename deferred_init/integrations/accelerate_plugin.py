"""A drop-in `Accelerator` that prepares models which have no memory yet.

[Note: The order of preparation]
Accelerate places, wraps and shards in `prepare`, and what it does to a model on meta
is wrong in each case: `.to(device)` raises, DDP broadcasts nothing, and under FSDP2 it
finds the optimizer's parameters by `data_ptr()`, which on meta is 0 for all, so that
every group ends up with the last parameter. Here the order is: convert to Transformer
Engine; then, for one process and DDP, materialize and let accelerate go on with a real
model; for FSDP2, let accelerate shard on meta, point the optimizers to the sharded
parameters by name, and materialize the shards; for FSDP1, materialize unit by unit.
What torch.compile wraps is compiled at its first forward, after all of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator as _Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn
from torch.optim import Optimizer

from deferred_init.aliases import is_deferred
from deferred_init.api import materialize, plan
from deferred_init.distributed.fsdp1 import param_init_fn
from deferred_init.errors import PlanError
from deferred_init.integrations.optimizer_names import OptimizerNames, plain
from deferred_init.integrations.te_conversion import Conversion, convert_to_te
from deferred_init.integrations.te_forward import compute_with
from deferred_init.recipe import Recipe
from deferred_init.report import Report

__all__ = ["Accelerator", "DeferredInitPlugin", "attach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredInitPlugin:
    """How `prepare` materializes models without memory; see `materialize`.

    Attributes:
        recipe: As in `materialize`. One that names a Transformer Engine recipe makes
            the model compute with it; its weights stay in high precision, since
            ordinary optimizers step them.
        weights: A checkpoint to fill the (single) model from.
        names: How the checkpoint's names differ.
        missing: What happens to what the checkpoint lacks.
        rng: `"eager"` or `"by_name"`.
        seed: Seeds the generators first; None goes on with their state.
        verify: `"fast"` or `"full"`.
        convert: Replace torch's layers by Transformer Engine's before anything else:
            a `Conversion`, False for never, or None for the default conversion if
            the recipe names a Transformer Engine recipe.
    """

    recipe: object = None
    weights: object = None
    names: Any = ()
    missing: str = "init"
    rng: str = "eager"
    seed: int | None = None
    verify: str = "fast"
    convert: Conversion | bool | None = None

    def resolved_recipe(self) -> Recipe | None:
        """Return the recipe as a `Recipe` with weights in high precision."""
        if self.recipe is None:
            return None
        return replace(Recipe.load(self.recipe), quantize_weights=False)

    def conversion(self) -> Conversion | None:
        """Return what to convert, or None for nothing."""
        if isinstance(self.convert, Conversion):
            return self.convert
        recipe = self.resolved_recipe()
        wanted = recipe is not None and recipe.te_recipe is not None
        return (
            Conversion() if (wanted if self.convert is None else self.convert) else None
        )


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
        _convert(models, self._deferred_init)
        if sources is None:
            _compute(models, self._deferred_init)
            return go_on(*args, device_placement=device_placement)
        here = _Target(self, models, optimizers)
        if sources:  # real on some ranks only
            here.materialize(broadcast_from=sources[0])
        elif here.kind == "fsdp2":
            return here.shard_then_materialize(go_on, args, device_placement)
        elif here.kind == "fsdp1":
            here.plan()
            with _materialized_by_unit(self):
                return go_on(*args, device_placement=device_placement)
        else:
            here.materialize()
        _compute(models, self._deferred_init)
        return go_on(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare one model as accelerate does; materialize it if it has no memory."""
        here = _Target(self, [model], [])
        if here.kind == "whole" and _deferred([model]):
            _convert([model], self._deferred_init)
            here.materialize()
            _compute([model], self._deferred_init)
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
        super().__init__(*args, **kwargs)
        self._deferred_init = deferred_init or DeferredInitPlugin()
        self.deferred_init_reports = []


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


class _Target:
    """What one call of `prepare` has to materialize, and where."""

    def __init__(
        self, accelerator: Any, models: Sequence[nn.Module], optimizers: list[Optimizer]
    ) -> None:
        self._accelerator = accelerator
        self._plugin: DeferredInitPlugin = accelerator._deferred_init
        self._models = list(models)
        self._optimizers = _of_models(optimizers, self._models)

    @property
    def kind(self) -> str:
        """How accelerate spreads the model: `"fsdp2"`, `"fsdp1"` or `"whole"`."""
        if self._accelerator.is_fsdp2:
            return "fsdp2"
        sharded = self._accelerator.distributed_type == DistributedType.FSDP
        return "fsdp1" if sharded else "whole"

    def plan(self) -> None:
        """Raise now what would fail later."""
        plugin = self._plugin
        plan(
            self._models,
            self._accelerator.device,
            plugin.resolved_recipe(),
            optimizers=self._optimizers,
            seed=plugin.seed,
            rng=plugin.rng,
            verify=plugin.verify,
            weights=plugin.weights,
            names=plugin.names,
            missing=plugin.missing,
        )

    def materialize(self, broadcast_from: int | None = None) -> None:
        """Materialize the models where accelerate wants them."""
        plugin = self._plugin
        report = materialize(
            self._models,
            self._accelerator.device,
            plugin.resolved_recipe(),
            optimizers=self._optimizers,
            seed=plugin.seed,
            rng=plugin.rng,
            verify=plugin.verify,
            weights=plugin.weights,
            names=plugin.names,
            missing=plugin.missing,
            broadcast_from=broadcast_from,
        )
        self._accelerator.deferred_init_reports.append(report)

    def shard_then_materialize(self, go_on: Any, args: Any, placement: Any) -> Any:
        """Let accelerate shard on meta, then fill the shards."""
        self.plan()
        names = OptimizerNames(self._models, self._optimizers)
        with _without_loading(self._accelerator.state.fsdp_plugin):
            result = go_on(*args, device_placement=placement)
        prepared = result if isinstance(result, (tuple, list)) else (result,)
        wrapped = [item for item in prepared if isinstance(item, nn.Module)]
        self._models = [getattr(model, "_orig_mod", model) for model in wrapped]
        names.rebind(self._models)
        self.materialize()
        _compute(self._models, self._plugin)
        return result


def _is_new_model(item: object) -> bool:
    prepared = getattr(item, "_is_accelerate_prepared", False)
    return isinstance(item, nn.Module) and not prepared


def _deferred(models: Sequence[nn.Module]) -> bool:
    return any(
        is_deferred(tensor)
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
    )


def _real_ranks(models: Sequence[nn.Module]) -> list[int] | None:
    """Return the ranks whose models are real, or None if they are real on all."""
    deferred = _deferred(models)
    if not (dist.is_available() and dist.is_initialized()):
        return [] if deferred else None
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, deferred)
    if not any(answers):
        return None
    return [rank for rank, answer in enumerate(answers) if not answer]


def _of_models(
    optimizers: Sequence[Optimizer], models: Sequence[nn.Module]
) -> list[Optimizer]:
    """Leave out optimizers of models that were prepared before."""
    owned = {id(param) for model in models for param in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(p) in owned for g in optimizer.param_groups for p in g["params"])
    ]


def _convert(models: Sequence[nn.Module], plugin: DeferredInitPlugin) -> None:
    conversion = plugin.conversion()
    if conversion is not None:
        for model in models:
            convert_to_te(model, conversion)


def _compute(models: Sequence[nn.Module], plugin: DeferredInitPlugin) -> None:
    recipe = plugin.resolved_recipe()
    if recipe is not None and recipe.te_recipe is not None:
        for model in models:
            compute_with(model, recipe.make_te_recipe())


@contextmanager
def _without_loading(fsdp_plugin: Any) -> Iterator[None]:
    """Switch off that accelerate sends rank 0's values, which do not exist yet."""
    before = fsdp_plugin.cpu_ram_efficient_loading
    fsdp_plugin.cpu_ram_efficient_loading = False
    try:
        yield
    finally:
        fsdp_plugin.cpu_ram_efficient_loading = before


@contextmanager
def _materialized_by_unit(accelerator: Any) -> Iterator[None]:
    """Let FSDP1 materialize each unit before it flattens it."""
    plugin: DeferredInitPlugin = accelerator._deferred_init
    unfit = [name for name in ("weights", "seed") if getattr(plugin, name) is not None]
    if unfit or plugin.rng != "eager":
        raise PlanError(
            "FSDP1 materializes its units one by one, which leaves no place for "
            f"{', '.join(unfit) or 'rng=' + plugin.rng}; use FSDP2 (`fsdp_version=2`), "
            "or set the seed before the model is built"
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

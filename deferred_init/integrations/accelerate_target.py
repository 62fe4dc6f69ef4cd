"""What one call of accelerate's `prepare` has to materialize, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from deferred_init.api import materialize, plan
from deferred_init.errors import PlanError
from deferred_init.integrations.conversion_report import Conversion
from deferred_init.integrations.optimizer_names import OptimizerNames
from deferred_init.integrations.te_forward import compute_with
from deferred_init.integrations.tp_plan import split_by_plan
from deferred_init.recipe import Recipe

__all__ = ["DeferredInitPlugin", "Target", "compute"]


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
        rng: `"eager"`, `"by_name"` or `"fast"`.
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
        spec = None if recipe is None else recipe.te_recipe
        if not (spec is not None if self.convert is None else self.convert):
            return None
        # MXFP8 has one scale per 32 values; the other formats need multiples of 16.
        by_32 = spec is not None and spec.name == "MXFP8BlockScaling"
        return Conversion(multiple_of=32 if by_32 else 16)


class Target:
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

    def _options(self) -> dict[str, Any]:
        """Return what the plugin says, as arguments of `plan` and `materialize`."""
        plugin = self._plugin
        names = ("seed", "rng", "verify", "weights", "names", "missing")
        return {
            "recipe": plugin.resolved_recipe(),
            "optimizers": self._optimizers,
            **{name: getattr(plugin, name) for name in names},
        }

    def split(self) -> None:
        """Apply tensor parallelism, if accelerate is configured for it."""
        parallelism = getattr(self._accelerator, "parallelism_config", None)
        if parallelism is None or not parallelism.tp_enabled:
            return
        if self._plugin.conversion() is not None:
            raise PlanError(
                "tensor parallelism splits torch's layers, and the plugin turns them "
                "into Transformer Engine's: use a recipe without one, `convert=False`, "
                "or a model that is built with `tp_group=`"
            )
        names = OptimizerNames(self._models, self._optimizers)
        for model in self._models:
            split_by_plan(model, self._accelerator.torch_device_mesh["tp"])
        names.rebind(self._models)

    def plan(self) -> None:
        """Raise now what would fail later."""
        plan(self._models, self._accelerator.device, **self._options())

    def materialize(self, broadcast_from: int | None = None) -> None:
        """Materialize the models where accelerate wants them."""
        report = materialize(
            self._models,
            self._accelerator.device,
            broadcast_from=broadcast_from,
            **self._options(),
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
        compute(self._models, self._plugin)
        return result


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


def compute(models: Sequence[nn.Module], plugin: DeferredInitPlugin) -> None:
    """Let models compute with the plugin's recipe, if Transformer Engine has it."""
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

"""Whether, and by which recipe, a module's weights are stored quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import dense_bytes, is_sharded
from deferred_init.handlers.protocol import Request
from deferred_init.representation import Representation
from deferred_init.slots import Slot
from deferred_init.te_recipe import TERecipeSpec, is_te_recipe

__all__ = ["Choice", "choose", "problems_with", "stored_as", "whole_bytes"]

_KINDS_OF_SHARDS = ("delayed", "current", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What becomes of the weights of one module.

    Attributes:
        quantized: Whether they are stored quantized.
        built_quantized: Whether the module was built that way.
        te_recipe: TE's recipe object for them, or None.
        own: Whether the recipe is the one that the module was built with.
        keep_high_precision: Keep the values from before quantization on the host.
        inference: Row-wise data only.
        spec: What is known of the recipe; None if it is none of TE's.
    """

    quantized: bool
    built_quantized: bool
    te_recipe: Any
    own: bool
    keep_high_precision: bool
    inference: bool
    spec: TERecipeSpec | None = None

    @property
    def representation(self) -> Representation | None:
        """How weights are stored; None if they are dense, or nobody knows."""
        if not self.quantized or self.spec is None:
            return None
        return Representation(
            te_recipe=self.spec.name,
            kind=self.spec.kind,
            columnwise=not self.inference,
            block_dim=getattr(self.te_recipe, "w_block_scaling_dim", 2),
        )

    def grad_mode(self) -> AbstractContextManager[None]:
        """The grad mode to run TE's own code in.

        TE makes the column-wise copy, which the backward pass reads, only while grad
        mode is on. Its high-precision code writes into leaves, which needs it off.
        """
        on = self.quantized and not self.inference
        return torch.set_grad_enabled(on)


def choose(
    fqn: str, request: Request, *, built: bool, own_recipe: Any, keeps: bool = False
) -> Choice:
    """Decide for one module.

    Args:
        fqn: Its qualified name, for the recipe's exclusions; the names of the modules
            around it count as well.
        request: What the caller asked for.
        built: Whether it was built inside `quantized_model_init`.
        own_recipe: The TE recipe that it was built with, or None.
        keeps: Whether it was built to keep high-precision initial values.
    """
    recipe = request.recipe
    asked = recipe is not None and recipe.te_recipe is not None
    quantized = built or (recipe is not None and recipe.quantize_weights)
    if recipe is not None and quantized and _excluded(fqn, recipe):
        quantized = False
    te_recipe = own_recipe
    if asked and quantized:  # one for all, as inside TE's `quantized_model_init`
        te_recipe = request.once("te_recipe", recipe.make_te_recipe)

    def make() -> Choice:
        known = is_te_recipe(te_recipe)
        return Choice(
            quantized=quantized,
            built_quantized=built,
            te_recipe=te_recipe,
            own=not asked,
            keep_high_precision=keeps
            or (recipe is not None and recipe.keep_high_precision_init),
            inference=recipe is not None and recipe.inference,
            spec=TERecipeSpec.from_te_recipe(te_recipe) if known else None,
        )

    # The choice keeps the recipe, so that its id stays its own.
    return request.once((Choice, quantized, built, keeps, id(te_recipe)), make)


def _excluded(fqn: str, recipe: Any) -> bool:
    if not recipe.high_precision_modules:
        return False
    parts = fqn.split(".")
    names = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return any(recipe.keeps_high_precision(name) for name in names)


def problems_with(
    choice: Choice, label: str, request: Request, weights: list[Tensor]
) -> tuple[str, ...]:
    """Say why the quantized weights of a module cannot be made; empty if they can."""
    if not choice.quantized or not weights:
        return ()
    if request.device.type != "cuda":
        return (
            f"{label} stores its weights quantized, which Transformer Engine does on "
            f"CUDA only, and the device asked for is {request.device}: materialize on "
            "a CUDA device, or with a recipe that keeps weights in high precision",
        )
    if choice.te_recipe is None:
        return (
            f"{label} was built with quantized weights, but holds no recipe any more "
            "(a forward outside of `autocast` drops it): pass `recipe=`",
        )
    found = []
    capability = request.once(_capability, lambda: _capability(request))
    if capability is not None and choice.spec is not None:
        reason = choice.spec.unsupported_reason(capability)
        if reason is not None:
            found.append(
                f"{label} cannot store quantized weights on {_gpu_name(request)}: "
                f"{reason}. Choose another recipe, such as `fp8_current`"
            )
    if any(is_sharded(weight) for weight in weights):
        found += _shard_problem(choice, label)
    return tuple(found)


def _shard_problem(choice: Choice, label: str) -> Iterator[str]:
    """Say why weights that are sharded already cannot become quantized shards."""
    if choice.spec is None or choice.spec.kind not in _KINDS_OF_SHARDS:
        name = type(choice.te_recipe).__name__
        yield (
            f"{label} stores its weights quantized by `{name}` and is sharded already, "
            "which works for delayed, current and block scaling: materialize the "
            "model first, then call `fully_shard`"
        )


def stored_as(
    choice: Choice, slots: Iterable[Slot]
) -> tuple[tuple[Slot, Representation], ...]:
    """Say how the weights of a module are stored, for plans; empty if dense."""
    how = choice.representation
    if how is None:
        return ()
    if how.kind == "block":  # kept in high precision, see te/sharded.py
        slots = [slot for slot in slots if not is_sharded(slot.tensor)]
    return tuple((slot, how) for slot in slots)


def whole_bytes(choice: Choice, weights: Iterable[Tensor]) -> int:
    """Bytes of weights in full, stored quantized; as they are where that is unknown."""
    how = choice.representation
    total = 0
    for weight in weights:
        stored = how.num_bytes(tuple(weight.shape)) if how else None
        total += dense_bytes(weight) if stored is None else stored
    return total


def _capability(request: Request) -> tuple[int, int] | None:
    if request.compute_capability is not None:
        return request.compute_capability
    # A device without an index was asked for where no such device need exist.
    if request.device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(request.device)


def _gpu_name(request: Request) -> str:
    if request.compute_capability is not None:
        return "the GPU that was planned for"
    return f"{request.device} ({torch.cuda.get_device_name(request.device)})"

"""The recipe state of TE modules and ops: their quantizers, and the scales in them.

A constructor makes it, on the device that is current then. A module that was built
without memory, or is to be stored by another recipe, gets it anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.slots import Slot, SlotKind
from deferred_init.te.constructed import mark_rowwise_only
from deferred_init.te.probe import quantized_init
from deferred_init.te.quantization import Choice

__all__ = [
    "is_recipe_state",
    "is_stale",
    "own_recipe_of_module",
    "own_recipe_of_op",
    "set_up_module",
    "set_up_op",
]

_PLACES = ("fp8_meta[", "_fp8_metas[")


def is_recipe_state(slot: Slot) -> bool:
    """Whether a slot is in the recipe state of a module or an op."""
    return slot.kind is SlotKind.ATTRIBUTE and slot.name.startswith(_PLACES)


def is_stale(state: Any, claimed: Iterable[Slot], device: torch.device) -> bool:
    """Whether recipe state has to be made again, to have memory on a device.

    Args:
        state: A module's `fp8_meta`, or an op's `_fp8_metas`.
        claimed: Slots of the module that have no memory.
        device: The device asked for, with its index.
    """
    return any(map(is_recipe_state, claimed)) or _is_elsewhere(state, device)


def own_recipe_of_module(module: nn.Module) -> Any:
    """Return the TE recipe that a TE module was built with, or None."""
    return vars(module).get("fp8_meta", {}).get("recipe")


def own_recipe_of_op(op: nn.Module) -> Any:
    """Return the TE recipe that a basic op was built with, or None."""
    metas = vars(op).get("_fp8_metas") or {}
    for meta in metas.values():
        if meta is not None and meta.get("recipe") is not None:
            return meta["recipe"]
    return None


def _is_elsewhere(state: Any, device: torch.device) -> bool:
    """Whether recipe state has memory on another device than the one asked for.

    TE allocates the scales of delayed scaling on the device that is current when a
    module is constructed, also for a module on meta.
    """
    for meta in (state, *(state or {}).values()):
        for each in meta.values() if isinstance(meta, dict) else ():
            scale = getattr(each, "scale", None)
            if not isinstance(scale, Tensor) or scale.is_meta:
                continue
            if scale.device != device:
                return True
    return False


def _num_gemms(module: Any) -> int:
    """Count the matrix products of a TE module, from its weights' places.

    Each has three forward quantizers: input, weight, output.
    """
    places = (meta.fp8_meta_index for meta in module.param_init_meta.values())
    return max((int(p) for p in places if p is not None), default=1) // 3 + 1


def set_up_module(module: Any, choice: Choice, *, stale: bool) -> None:
    """Give a TE module the recipe state that a constructor would have made.

    Args:
        module: The module.
        choice: What was decided.
        stale: Whether its present state has no memory and has to be made again.
    """
    if choice.quantized and choice.inference:
        mark_rowwise_only(module)
    if choice.quantized == choice.built_quantized and choice.own and not stale:
        return
    if not (choice.quantized or choice.built_quantized):
        return
    attributes = vars(module)
    # New dicts, so that putting the old attributes back undoes this.
    group = attributes["fp8_meta"].get("fp8_group")
    attributes["fp8_meta"] = {"fp8_checkpoint": False, "fp8_group": group}
    attributes["quantizers"] = {"scaling_fwd": [], "scaling_bwd": []}
    attributes["fp8_initialized"] = False
    attributes["fp8_meta_tensors_initialized"] = False
    attributes["primary_weights_in_fp8"] = choice.quantized
    if not choice.quantized:
        attributes["fp8_parameters"] = False
        return
    attributes["preserve_high_precision_init_val"] = choice.keep_high_precision
    with quantized_init(
        choice.te_recipe, keep_high_precision=choice.keep_high_precision
    ):
        module.init_fp8_metadata(num_gemms=_num_gemms(module))


def set_up_op(op: Any, choice: Choice, *, stale: bool) -> None:
    """Give a basic op the recipe state that its constructor would have made."""
    if choice.quantized and choice.inference:
        mark_rowwise_only(op)
    if not (choice.quantized or choice.built_quantized):
        return
    vars(op)["_with_quantized_weight"] = choice.quantized
    if not choice.quantized:
        op.reset_recipe_state(recipe=None)
        return
    if not choice.own or stale:
        op.reset_recipe_state(recipe=None)
    with quantized_init(choice.te_recipe):
        op.reset_recipe_state(recipe=choice.te_recipe)

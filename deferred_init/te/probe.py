"""What the installed Transformer Engine release has, found by looking, not by number.

Releases 2.7 to 2.20.2 differ in names and places. Everything that differs is asked
for here, so that an unknown newer release is tried, and audited, rather than refused.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Capabilities", "capabilities", "fp8_state_manager"]
__all__ += ["is_quantized", "quantized_init"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a release has.

    Attributes:
        op_hook: `BasicOperation.pre_first_fuser_forward`, which makes an op's
            parameters before its first forward (2.7).
        recipe_state_hook: `BasicOperation.reset_recipe_state`.
        linear_aliases: `ops.Linear` registers `weight` and `bias` itself (2.7).
        grouped_op: `ops.GroupedLinear` (2.13).
        quantized_model_init: The name without `fp8` (2.9).
        autocast: The name without `fp8` (2.9).
        extra_state_gate: FP8 state held in one object (2.15).
        fuser_tracks_versions: The fuser notices new parameters by itself, as pull
            request 3327 does.
        grouped_tensor: All experts' weights in one tensor (2.14).
        user_fusions: `register_forward_fusion` (2.13).
    """

    op_hook: bool
    recipe_state_hook: bool
    linear_aliases: bool
    grouped_op: bool
    quantized_model_init: bool
    autocast: bool
    extra_state_gate: bool
    fuser_tracks_versions: bool
    grouped_tensor: bool
    user_fusions: bool

    def to_dict(self) -> dict[str, bool]:
        """Return the capabilities by name."""
        return {each.name: bool(getattr(self, each.name)) for each in fields(self)}


@functools.cache
def capabilities() -> Capabilities:
    """Look at the imported Transformer Engine.

    Raises:
        ImportError: There is none.
    """
    te = importlib.import_module("transformer_engine.pytorch")
    ops = importlib.import_module("transformer_engine.pytorch.ops")
    base = importlib.import_module("transformer_engine.pytorch.ops.op").BasicOperation
    fuser = importlib.import_module("transformer_engine.pytorch.ops.fuser")
    return Capabilities(
        op_hook=hasattr(base, "pre_first_fuser_forward"),
        recipe_state_hook=hasattr(base, "reset_recipe_state"),
        linear_aliases="register_parameter" in vars(ops.Linear),
        grouped_op=hasattr(ops, "GroupedLinear"),
        quantized_model_init=hasattr(te, "quantized_model_init"),
        autocast=hasattr(te, "autocast"),
        extra_state_gate=hasattr(fp8_state_manager(), "quantization_state"),
        fuser_tracks_versions=hasattr(fuser.OperationFuser, "_cache_parameters"),
        grouped_tensor=hasattr(
            getattr(ops, "GroupedLinear", None), "make_grouped_weights"
        ),
        user_fusions=hasattr(ops, "register_forward_fusion"),
    )


def fp8_state_manager() -> Any:
    """Return `FP8GlobalStateManager` from wherever this release keeps it."""
    try:
        module = importlib.import_module("transformer_engine.pytorch.quantization")
    except ModuleNotFoundError:
        module = importlib.import_module("transformer_engine.pytorch.fp8")
    return module.FP8GlobalStateManager


def is_quantized(tensor: object) -> bool:
    """Whether a tensor is one of TE's quantized ones.

    By name, as the module that defines their base class has moved (2.9).
    """
    kind: Any = type(tensor)
    return _is_quantized_type(kind)


@functools.lru_cache(maxsize=256)
def _is_quantized_type(kind: Any) -> bool:
    return any(
        base.__name__ in ("QuantizedTensor", "QuantizedTensorStorage")
        and base.__module__.startswith("transformer_engine")
        for base in kind.__mro__
    )


def quantized_init(
    te_recipe: Any, *, enabled: bool = True, keep_high_precision: bool = False
) -> AbstractContextManager[Any]:
    """Return TE's context in which modules are built with quantized weights."""
    te = importlib.import_module("transformer_engine.pytorch")
    context = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    found: AbstractContextManager[Any] = context(
        enabled=enabled,
        recipe=te_recipe,
        preserve_high_precision_init_val=keep_high_precision,
    )
    return found

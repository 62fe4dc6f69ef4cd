"""What `deferred-init doctor` says about Transformer Engine."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import torch

from deferred_init.te.probe import capabilities
from deferred_init.te_recipe import TERecipeSpec

__all__ = ["WORKED_AROUND", "report"]

WORKED_AROUND = (
    "first backward of te.ops built on meta fails (NVIDIA/TransformerEngine#3322)",
    "ops.Linear.weight and .bias stay on meta",
    "reset_parameters loses requires_grad, attributes and hooks",
    "reset_parameters draws again for parameters that have values",
    "reset_parameters fills softmax_offset from a normal distribution",
    "device=torch.device('meta') allocates on the GPU",
    "fuse_qkv_params=False cannot be built on meta",
    "GroupedLinear with single_grouped_bias alone cannot leave meta",
    "no column-wise FP8 data under torch.no_grad()",
    "Bias remembers the device of the time of its construction",
    "reset_parameters draws parameters that a subclass adds",
    "releases up to 2.9 forget init functions of what is registered again",
    "FusedAdam's learning rate and FusedSGD's overflow flag stay on meta",
)
_RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)


def report() -> dict[str, Any]:
    """Return versions, what the release has, what the GPU can run, known bugs."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    found: dict[str, Any] = {
        "version": metadata.version("transformer-engine")
        if _is_installed()
        else getattr(
            importlib.import_module("transformer_engine"), "__version__", "unknown"
        ),
        "has": capabilities().to_dict(),
        "recipes": [name for name in _RECIPES if hasattr(recipes, name)],
    }
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        specs = [TERecipeSpec(name=name) for name in found["recipes"]]
        reasons = {spec.name: spec.unsupported_reason(capability) for spec in specs}
        found["runs here"] = [name for name, why in reasons.items() if why is None]
    found["worked around"] = list(WORKED_AROUND)
    return found


def _is_installed() -> bool:
    try:
        metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return False
    return True

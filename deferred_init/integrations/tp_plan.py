"""Tensor parallelism by the plan that a Hugging Face model brings along.

Accelerate takes models that are split already and refuses others; transformers splits
while it loads a checkpoint. A model without memory is split here, by torch's styles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from deferred_init.errors import PlanError, listing

__all__ = ["split_by_plan"]


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _from_whole() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


# Transformers has renamed the styles at the borders of the split part.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": _gathered,
    "colwise_gather_output": _gathered,
    "rowwise_rep": _from_whole,
    "rowwise_split_input": _from_whole,
    "embedding_rowwise": _from_whole,
}


def split_by_plan(model: nn.Module, mesh: Any) -> bool:
    """Split a model over a mesh as its tensor parallel plan says.

    The Parameters of split layers become DTensors, so optimizers have to be pointed to
    them. A layer that shares a Parameter with another one stays whole on every rank.

    Args:
        model: A Hugging Face model without memory; one that holds DTensors already
            is left alone.
        mesh: The mesh of one dimension, of all ranks that share a layer.

    Returns:
        Whether anything was split.

    Raises:
        PlanError: The model has no plan, or one that torch's styles cannot carry out;
            nothing was changed.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return False
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise PlanError(
            f"{type(model).__name__} has no tensor parallel plan; split it with "
            "torch's `parallelize_module` while it has no memory, before `prepare`"
        )
    layers = _planned(model, plan)
    unfit = [
        f"{fqn}: {style} of {type(module).__name__}"
        for fqn, module, style in layers
        if style not in _STYLES or not isinstance(module, (nn.Linear, nn.Embedding))
    ]
    if unfit:
        raise PlanError(
            f"torch's styles cannot split {len(unfit)} parts of {type(model).__name__} "
            f"as its tensor parallel plan says: {listing(unfit)}; split the model with "
            "`parallelize_module` while it has no memory, before `prepare`",
            unfit,
        )
    shared = Counter(
        id(param) for _, param in model.named_parameters(remove_duplicate=False)
    )
    for _, module, style in layers:
        if all(shared[id(param)] == 1 for param in module.parameters()):
            parallelize_module(module, mesh, _STYLES[style]())
    vars(model)["_tp_size"] = mesh.size()  # where accelerate looks for it
    return True


def _planned(
    model: nn.Module, plan: dict[str, str]
) -> list[tuple[str, nn.Module, str]]:
    """Return what a plan names, layers or parameters, with the owner and the style."""
    found = []
    for fqn, module in model.named_modules():
        own = [f"{fqn}.{name}" for name, _ in module.named_parameters(recurse=False)]
        for name in (fqn, *own):
            style = plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
            if style is not None:
                found.append((name, module, style))
    return found

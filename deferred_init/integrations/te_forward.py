"""Let a model's forward compute with a Transformer Engine recipe."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["compute_with"]


def compute_with(model: nn.Module, te_recipe: Any) -> None:
    """Run the forward of a model inside Transformer Engine's `autocast`, in training.

    In evaluation mode it computes in high precision, as is usual.
    Calling it again replaces the recipe. Accelerate's `unwrap_model` with
    `keep_fp32_wrapper=False` takes it off, as it does with its own wrappers.

    Args:
        model: Its `forward` is replaced by one that enters the context.
        te_recipe: The recipe to compute with.
    """
    import transformer_engine.pytorch as te

    autocast = getattr(te, "autocast", None)
    keyword = "recipe"
    if autocast is None:  # before 2.9
        autocast, keyword = te.fp8_autocast, "fp8_recipe"
    bare = getattr(model.forward, "_deferred_init_bare", model.forward)

    @functools.wraps(bare)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast(enabled=self.training, **{keyword: te_recipe}):
            return bare(*args, **kwargs)

    vars(forward)["_deferred_init_bare"] = bare
    model.forward = MethodType(forward, model)

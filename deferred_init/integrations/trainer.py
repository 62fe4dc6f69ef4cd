"""For Hugging Face's `Trainer`, which takes a function that makes the model.

`Trainer(model_init=...)` calls the function, seeded, when training starts, and again
for every trial of a hyperparameter search; it then builds the optimizer and moves the
model to its device, which does nothing here, because the model is there already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deferred_init.api import materialize
from deferred_init.integrations.conversion_report import Conversion
from deferred_init.integrations.te_conversion import convert_to_te
from deferred_init.record import deferred_init
from deferred_init.validate import device_or_default

__all__ = ["model_init"]


def model_init(
    build: Callable[..., nn.Module],
    *args: Any,
    device: torch.device | str | None = None,
    recipe: object = None,
    convert: Conversion | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[[], nn.Module]:
    """Return a function for `Trainer(model_init=...)`.

    Args:
        build: The constructor, as `LlamaForCausalLM` or `Model._from_config`.
        *args: Its arguments.
        device: Where the model shall be; by default the current CUDA device of this
            rank, or the CPU where there is none.
        recipe: As in `materialize`.
        convert: Turn layers into Transformer Engine's; None leaves them.
        options: More arguments of `materialize`, as `{"weights": folder}` for trained
            weights, or `{"seed": 0}`. Without a seed that of the trainer counts.
        **kwargs: Keyword arguments of the constructor.

    Returns:
        A function without arguments that makes the model anew. The report of the last
        time is its attribute `report`.

    Example:
        >>> import torch
        >>> from deferred_init.integrations.trainer import model_init
        >>> make = model_init(torch.nn.Linear, 4, 2, device="cpu")
        >>> make().weight.device.type, make.report.ok
        ('cpu', True)
    """

    def make() -> nn.Module:
        model: nn.Module = deferred_init(build, *args, **kwargs)
        if convert is not None:
            convert_to_te(model, convert)
        target = device_or_default(device)
        report = materialize(model, target, recipe, **(options or {}))
        vars(make)["report"] = report
        return model

    return make

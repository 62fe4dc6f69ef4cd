"""Materialize a model when it is first used, for code that cannot call it itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deferred_init.api import materialize
from deferred_init.report import Report

__all__ = ["PendingMaterialization", "materialize_on_first_forward"]


class PendingMaterialization:
    """What was asked for, until the first forward does it.

    Attributes:
        report: The report, once it was done; None before.
    """

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        self.report: Report | None = None
        self._arguments = arguments
        self._handle: RemovableHandle | None = model.register_forward_pre_hook(
            self._before_forward, prepend=True, with_kwargs=True
        )

    @property
    def pending(self) -> bool:
        """Whether the work is still to be done."""
        return self._handle is not None

    def remove(self) -> None:
        """Forget about it; does nothing once the work was done."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.report is not None:
            return
        with torch.enable_grad():
            self.report = materialize(model, **self._arguments)
        self.remove()


def materialize_on_first_forward(
    model: nn.Module,
    device: torch.device | str | int,
    recipe: object = None,
    **options: Any,
) -> PendingMaterialization:
    """Materialize a model at the beginning of its first forward pass.

    Does the work of `materialize(model, device, recipe, **options)`, in the same
    order, before anything else of the forward, and then removes its hook. If it
    fails the error reaches the caller of the forward, the model stays as it was, and
    the next forward tries again.

    Args:
        model: The model whose first call starts the work.
        device: As in `materialize`.
        recipe: As in `materialize`.
        **options: Other keyword arguments of `materialize`.

    Returns:
        A handle with the `report`, and with `remove()` to call it off.

    Example:
        >>> import torch, deferred_init as di
        >>> model = torch.nn.Linear(2, 1, device="meta")
        >>> handle = di.materialize_on_first_forward(model, "cpu", seed=0)
        >>> model(torch.ones(1, 2)).shape, handle.pending
        (torch.Size([1, 1]), False)
    """
    arguments = {"device": device, "recipe": recipe, **options}
    return PendingMaterialization(model, arguments)

"""Initializers for what TE's attention allocates outside of `reset_parameters`."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch.attention.dot_product_attention import (
    DotProductAttention,
)
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.slots import ModuleSite, Slot
from deferred_init.te.constructed import rotary_dim

__all__ = ["RotaryInit", "SoftmaxOffsetInit"]


class SoftmaxOffsetInit:
    """Zeroes `softmax_offset`, as the constructor of attention does.

    TE's `reset_parameters` would fill it from a normal distribution.
    """

    name = "te.modules"
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim the offset, learnable or not."""
        made = tuple(slot for slot in pending if slot.name == "softmax_offset")
        return Claim(slots=made, source="zeros") if made else None

    def run(self, step: Step, workspace: Workspace) -> None:
        """Fill with zeros; draws nothing."""
        with workspace.filling(step), torch.no_grad():
            for slot in step.claim.slots:
                slot.read().zero_()


class RotaryInit:
    """Computes `inv_freq` again, on the device, by the constructor's formula."""

    name = "te.modules"
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim the buffer."""
        made = tuple(slot for slot in pending if slot.name == "inv_freq")
        if not made:
            return None
        known = rotary_dim(site.module) is not None
        guess = f"`{made[0].fqn}` is for an even number of dimensions"
        return Claim(
            slots=made, source="inv_freq", assumptions=() if known else (guess,)
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Compute the frequencies."""
        module: Any = step.site.module
        with workspace.filling(step), torch.no_grad():
            buffer = module.inv_freq
            dim = rotary_dim(module) or 2 * buffer.numel()
            exponents = torch.arange(
                0, dim, 2, dtype=torch.float32, device=buffer.device
            )
            buffer.copy_(1.0 / (module.rotary_base ** (exponents / dim)))


add_initializer(SoftmaxOffsetInit(), DotProductAttention)
add_initializer(RotaryInit(), RotaryPositionEmbedding)

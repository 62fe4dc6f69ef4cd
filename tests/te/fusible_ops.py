"""Fusible ops that compute on a CPU too, and steps of training with them.

Transformer Engine's `Bias` does; its linear ops do not, so the matrix product is an op
as a user would write it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.ops.op import BasicOperation

__all__ = ["Product", "build", "step", "train"]

SIZE = 8
CPU = torch.device("cpu")


class Product(BasicOperation):
    """Multiplies by a matrix; makes it as the ops of Transformer Engine make theirs."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size, device=device))
        if device != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrix."""
        self.weight = nn.Parameter(torch.randn(self.weight.shape, device=CPU))

    def pre_first_fuser_forward(self) -> None:
        """Make what is on meta."""
        if self.weight.is_meta:
            self.reset_parameters()

    def op_forward(self, ctx: Any, x: Any, **kwargs: Any) -> Any:
        """Multiply."""
        ctx.save_for_backward(x, self.weight)
        return x @ self.weight.mT

    def op_backward(self, ctx: Any, grad: Any) -> Any:
        """Return the gradients of the input and the matrix."""
        x, weight = ctx.saved_tensors
        return grad @ weight, [grad.mT @ x]


def build(device: str, make: Callable[..., nn.Module] = te.ops.Sequential) -> Any:
    """Build bias, product, bias; whoever makes biases on meta asks for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        ops = [
            te.ops.Bias(SIZE, device=device),
            Product(SIZE, device),
            te.ops.Bias(SIZE, device=device),
        ]
    for op in ops:
        if isinstance(op, te.ops.Bias):
            op.device = CPU  # where Transformer Engine's own hook will make it
    return make(*ops)


def step(model: Any, seed: int) -> Tensor:
    """Run a forward and a backward; return the output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, SIZE, generator=generator)
    out: Tensor = model(x)
    (out * torch.randn(4, SIZE, generator=generator)).sum().backward()
    return out.detach().clone()


def train(
    model: Any, optimizer: torch.optim.Optimizer | None = None, steps: int = 3
) -> list[Tensor | None]:
    """Train; return all outputs and gradients."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[Tensor | None] = []
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        seen.append(step(model, number))
        seen += [
            None if param.grad is None else param.grad.clone()
            for param in model.parameters()
        ]
        optimizer.step()
    return seen

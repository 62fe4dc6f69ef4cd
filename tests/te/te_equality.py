"""What it means that two models, or what they computed, are equal bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["assert_same_parameters", "same_tensors"]


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    """Assert equality of names, values, strides, flags and Python attributes."""
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert tensor.stride() == second[name].stride(), name
        assert tensor.requires_grad == second[name].requires_grad, name
        assert tensor.__dict__ == second[name].__dict__, name


def same_tensors(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Tell whether two lists have equal tensors, and None, in the same places."""
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )

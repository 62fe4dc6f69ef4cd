"""At the first forward: once, or not at all, or again after a failure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.handlers.registry import unregister_initializer


def _eager() -> torch.Tensor:
    torch.manual_seed(3)
    return nn.Linear(2, 2).weight.detach()


def test_the_first_forward_makes_the_model_and_later_ones_leave_it() -> None:
    model = nn.Linear(2, 2, device="meta")
    handle = di.materialize_on_first_forward(model, "cpu", seed=3)
    assert handle.pending
    assert handle.report is None
    with torch.no_grad():
        first = model(torch.ones(1, 2))
    assert not handle.pending
    assert handle.report is not None
    assert handle.report.ok
    assert torch.equal(model.weight, _eager())
    assert not model._forward_pre_hooks
    report = handle.report
    assert torch.equal(model(torch.ones(1, 2)), first)
    assert handle.report is report
    handle.remove()  # nothing is left to forget


def test_what_was_forgotten_is_not_done() -> None:
    model = nn.Linear(2, 2, device="meta")
    handle = di.materialize_on_first_forward(model, "cpu", seed=3)
    handle.remove()
    assert not handle.pending
    assert model(torch.ones(1, 2, device="meta")).is_meta
    assert handle.report is None


class Unknown(nn.Module):
    """Nothing tells how its weight is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_failure_reaches_the_caller_and_the_next_forward_tries_again() -> None:
    model = Unknown()
    handle = di.materialize_on_first_forward(model, "cpu", seed=3)
    with pytest.raises(di.PlanError, match="weight"):
        model(torch.ones(1, 2))
    assert handle.pending
    assert model.weight.is_meta
    di.register_initializer(Unknown, lambda module: nn.init.ones_(module.weight))
    try:
        assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    finally:
        unregister_initializer(Unknown)
    assert not handle.pending

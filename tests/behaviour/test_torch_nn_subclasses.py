"""Subclasses of modules of `torch.nn`: made by what they override, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import assert_same


def test_a_subclass_that_overrides_nothing_is_made_and_its_constructor_reported() -> (
    None
):
    class Wide(nn.Linear):
        def __init__(self, device: str | None = None) -> None:
            super().__init__(2, 8, device=device)

    torch.manual_seed(0)
    expected = Wide()
    model = Wide("meta")
    report = di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)
    assert any("the constructor of" in text for text in report.assumptions)


def test_a_subclass_with_another_init_method_is_made_by_that_method() -> None:
    class Small(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, std=1e-3)
            nn.init.ones_(self.bias)

    torch.manual_seed(0)
    expected = Small(3, 4)
    model = Small(3, 4, device="meta")
    di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)


def test_a_subclass_with_a_parameter_of_unknown_value_is_refused_by_name() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.full((2,), 0.1))

    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(di.PlanError, match=r"`scale` \(parameter of `Scaled`\)"):
        di.materialize(model, "cpu", seed=0)
    assert model.weight.is_meta

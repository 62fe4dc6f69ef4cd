"""Tensors that are keys of a dict are made, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di


class _Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table = {torch.arange(2): 1, ("a", torch.ones(2)): 2}
        self.names = {self.layer.weight: "weight", self.layer: "layer"}


def test_recorded_keys_have_eagers_values_and_stay_the_same_keys() -> None:
    model = di.deferred_init(_Keyed)
    first, (_, second) = model.table
    weight, layer = model.names
    report = di.materialize(model, "cpu", seed=0, progress=False)
    assert report.ok
    assert next(iter(model.table)) is first
    assert type(first) is type(second) is torch.Tensor
    assert (first.tolist(), second.tolist()) == ([0, 1], [1.0, 1.0])
    assert model.table[first] == 1
    assert weight is model.layer.weight
    assert layer is model.layer
    assert model.names[model.layer.weight] == "weight"


def test_keys_on_meta_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = _Keyed()
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", progress=False)
    assert "`table.keys()[0]` (attribute of `_Keyed`)" in str(caught.value)
    assert "`table.keys()[1][1]` (attribute of `_Keyed`)" in str(caught.value)
    assert "names" not in str(caught.value)

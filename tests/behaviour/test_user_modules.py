"""User modules with init methods: what they fill is made."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from tests.behaviour.equal_models import made_as_eager, on_meta


def _with_method(name: str) -> type[nn.Module]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 3))
            self.register_buffer("table", torch.empty(4), persistent=False)
            getattr(self, name)()

    def fill(self: Any, scale: float = 0.5) -> None:
        nn.init.normal_(self.weight, std=scale)
        self.table.copy_(torch.arange(4.0))

    setattr(Model, name, fill)
    return Model


@pytest.mark.parametrize(
    "name", ["reset_parameters", "_reset_parameters", "init_weights", "_init_weights"]
)
def test_each_kind_of_init_method_is_run(name: str) -> None:
    made_as_eager(_with_method(name), verify="full")


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(6, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for part in self.qkv.chunk(3):
                nn.init.xavier_uniform_(part)


def test_a_fused_weight_filled_slice_by_slice_is_made() -> None:
    made_as_eager(Fused, verify="full")


class Schedule(nn.Module):
    """Reads values of a temporary only, as drop-path schedules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        rates = [x.item() for x in torch.linspace(0, 1, 3)]
        nn.init.constant_(self.weight, rates[1])


def test_a_method_that_reads_values_of_a_temporary_is_run() -> None:
    model = on_meta(Schedule)
    di.materialize(model, "cpu", seed=1)
    assert model.weight.tolist() == [0.5, 0.5, 0.5]


def test_a_method_that_the_constructor_does_not_call_is_run_and_reported() -> None:
    model = on_meta(Schedule)
    report = di.materialize(model, "cpu", seed=1)
    assert any(
        "the constructor of Schedule gives the values that `reset_parameters` gives, "
        "though it does not call it" in text
        for text in report.assumptions
    )


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.lin.weight.data.normal_(std=0.02)


def test_a_constructor_that_writes_values_itself_is_reported() -> None:
    report = di.materialize(on_meta(Writes), "cpu", seed=1)
    assert any(
        "what the constructor of Writes writes itself (`data`, `normal_`)" in text
        for text in report.assumptions
    )


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.empty(3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(3.0)


def test_a_plain_tensor_attribute_is_filled() -> None:
    model = on_meta(Attribute)
    scale: Tensor = model.scale
    di.materialize(model, "cpu")
    assert model.scale is scale
    assert scale.eq(3).all()


def test_a_plan_keeps_no_model_alive() -> None:
    model = on_meta(Fused)
    reference = weakref.ref(model)
    di.plan(model, "cpu")
    del model
    gc.collect()
    assert reference() is None

"""Init methods are tried without memory: nothing changes, the unfit is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import made_as_eager, on_meta


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("inv_freq", torch.arange(3.0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_what_a_method_does_not_fill_is_refused_by_name_and_nothing_changes() -> None:
    model = on_meta(lambda: nn.ModuleDict({"rope": Rotary()}))
    with pytest.raises(
        di.PlanError,
        match=(
            r"^1 tensor has no initializer: `rope.inv_freq` \(buffer of `Rotary`\)\. "
            r"Build the model inside `deferred_init\(...\)`, register an initializer "
            r"for `Rotary`"
        ),
    ):
        di.materialize(model, "cpu", seed=1)
    assert model["rope"].weight.is_meta


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].zero_()


class ReadsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.02)


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data = torch.empty(4, 3)


@pytest.mark.parametrize("kind", [Part, ReadsFirst, Empties])
def test_a_tensor_that_would_keep_garbage_is_not_claimed(
    kind: type[nn.Module],
) -> None:
    model = on_meta(kind)
    with pytest.raises(di.PlanError, match=r"`weight` \(parameter of"):
        di.materialize(model, "cpu", seed=1)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.randn(3, device=self.weight.device))
        self.bias.data = torch.full_like(self.bias, 2.0)
        self.calls = getattr(self, "calls", 0) + 1


def test_a_method_that_replaces_parameters_keeps_their_identity() -> None:
    made_as_eager(Replaces)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.names = ["a"]
        self.extra: dict[str, Any] = {}

    def reset_parameters(self) -> None:
        random.random()
        self.names.append("b")
        self.extra["w"] = self.weight
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.sum().item()
        raise ValueError("needs a config\nfile")


@pytest.mark.parametrize("kind", [Replaces, Raises])
def test_a_plan_leaves_the_module_and_the_generators_as_they_were(
    kind: type[nn.Module],
) -> None:
    model = on_meta(kind)
    before = dict(vars(model))
    tables = {k: dict(v) for k, v in before.items() if isinstance(v, dict)}
    states = torch.get_rng_state(), random.getstate()
    if kind is Raises:
        with pytest.raises(di.PlanError):
            di.plan(model, "cpu")
        assert model.names == ["a"]
    else:
        di.plan(model, "cpu")
    assert list(vars(model)) == list(before)
    for name, value in before.items():
        assert vars(model)[name] is value
        if isinstance(value, dict):
            assert list(value) == list(tables[name])
            assert all(value[k] is v for k, v in tables[name].items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_method_that_raises_without_memory_is_named_with_its_text() -> None:
    model = on_meta(Raises)
    with pytest.raises(
        di.PlanError,
        match=r"`Raises.reset_parameters` of `Raises` cannot be tried.*ValueError: "
        r"needs a config file.*deferred_init\(...\).*register an initializer",
    ):
        di.materialize(model, "cpu", seed=1)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.weight.sum().item() < 0:
            nn.init.zeros_(self.weight)


def test_a_method_that_reads_values_is_refused_with_the_reason() -> None:
    model = on_meta(DataDependent)
    with pytest.raises(di.PlanError, match=r"cannot be tried.*item\(\)"):
        di.materialize(model, "cpu", seed=1)


_OUTSIDE = torch.zeros(3)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        _OUTSIDE.add_(1)
        nn.init.normal_(self.weight)


def test_a_method_that_writes_outside_of_its_module_is_refused_unrun() -> None:
    with pytest.raises(di.PlanError, match="writes to a tensor outside of the module"):
        di.materialize(on_meta(Outside), "cpu", seed=1)
    assert _OUTSIDE.eq(0).all()


class Flagged(nn.Module):
    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.zero:
            nn.init.zeros_(self.table)


def test_modules_that_differ_in_a_flag_are_tried_apart() -> None:
    model = on_meta(lambda: nn.Sequential(Flagged(True), Flagged(False)))
    with pytest.raises(di.PlanError, match=r"^1 tensor has no .*: `1.table`"):
        di.materialize(model, "cpu", seed=1)

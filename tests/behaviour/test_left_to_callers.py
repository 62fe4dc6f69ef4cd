"""Init methods that are left to whoever constructs the model, as trainers do it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import assert_same


class _Public(nn.Module):
    """As torchtitan's and foundation-model-stack's models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def init_weights(self) -> None:
        nn.init.normal_(self.linear.weight, std=0.5)


class _Hook(nn.Module):
    """As litgpt's: "meant to be used with `gpt.apply(gpt._init_weights)`"."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)


class _Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Public()


class _Applied(_Hook):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)


class _Called(_Public):
    def __init__(self) -> None:
        super().__init__()
        self.init_weights()


class _CalledByName(_Hook):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.apply(self._init_weights)


@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (_Public, "init_weights", "_Public"),
        (_Hook, "_init_weights", "_Hook"),
        (_Within, "init_weights", "_Public"),
    ],
)
def test_a_method_that_only_a_caller_would_call_is_named(
    build: Callable[[], nn.Module], name: str, kind: str
) -> None:
    with torch.device("meta"):
        model = build()
    report = di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    assert_same(model, build())
    (text,) = report.assumptions
    assert text.startswith(f"`{name}` of {kind}, which its constructor does not call, ")
    assert "give `deferred_init(...)` a function that constructs the model" in text


@pytest.mark.parametrize("build", [_Applied, _Called, _CalledByName])
def test_a_method_that_the_constructor_calls_is_not(
    build: Callable[[], nn.Module],
) -> None:
    with torch.device("meta"):
        model = build()
    report = di.materialize(model, "cpu", seed=0)
    assert not any("does not call" in text for text in report.assumptions)


def test_nor_is_it_for_values_that_are_loaded() -> None:
    with torch.device("meta"):
        model = _Public()
    report = di.materialize(model, "cpu", weights=_Public().state_dict())
    assert report.assumptions == ()


def _initialized() -> nn.Module:
    model = _Public()
    model.init_weights()
    return model


def _built_on_meta_first() -> nn.Module:
    """As torchtitan's trainer on one device: the constructor draws nothing."""
    with torch.device("meta"):
        model = _Public()
    model.to_empty(device="cpu")
    nn.init.zeros_(model.linear.bias)
    model.init_weights()
    return model


def _normal(module: nn.Linear) -> None:
    nn.init.normal_(module.weight, std=0.5)


def _replaced() -> nn.Module:
    """As litgpt's `initialize_weights`."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for linear in model:
        linear.reset_parameters = partial(_normal, linear)  # type: ignore[assignment]
    return model


def _replaced_and_called() -> nn.Module:
    model = _replaced()
    for linear in model.children():
        linear.reset_parameters()  # type: ignore[operator]
    return model


@pytest.mark.parametrize(
    "build", [_initialized, _built_on_meta_first, _replaced, _replaced_and_called]
)
def test_a_function_that_constructs_and_calls_is_recorded_as_it_is(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    eager, state = build(), torch.get_rng_state()
    model = di.deferred_init(build)
    report = di.materialize(model, "cpu", seed=0)
    assert_same(model, eager)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.assumptions == ()


def test_methods_that_were_replaced_on_modules_of_torch_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = _replaced()
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", seed=0)
    assert len(caught.value.problems) == 2
    text = str(caught.value)
    assert "`0.weight`, `0.bias`: `reset_parameters` of this `Linear` was" in text
    assert "constructs the model and calls the new methods, or load real" in text
    assert all(parameter.is_meta for parameter in model.parameters())


def test_but_not_where_values_are_loaded() -> None:
    with torch.device("meta"):
        model = _replaced()
    weights = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    di.materialize(model, "cpu", weights=weights)
    assert torch.equal(model.get_parameter("1.weight"), torch.ones(3, 3))

"""What a checkpoint lacks gets eager's values, and what is loaded is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

import deferred_init as di
from tests.behaviour.equal_models import on_meta
from tests.weights.small_models import everything, stack


class Mixed(nn.Module):
    """Random parameters, a random buffer in the way, buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropped = nn.Dropout(0.1)
        self.last = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1.0 / torch.arange(1.0, 5.0), persistent=False)

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(1.0 / torch.arange(1.0, 5.0))


def num_draws(profiled: profile) -> int:
    """Count the kernels that filled a tensor with random numbers."""
    return sum(event.name == "aten::uniform_" for event in profiled.function_events)


HOW = [on_meta, di.deferred_init]


@pytest.mark.parametrize("build", HOW, ids=["meta", "recorded"])
@pytest.mark.parametrize(
    "absent", [(), ("last.weight",), ("first.",), ("norm.",), ("last.", "norm.bias")]
)
def test_what_is_missing_gets_the_value_that_eager_construction_gives_it(
    build: Any, absent: tuple[str, ...]
) -> None:
    torch.manual_seed(9)
    stored = {
        key: torch.randn(value.shape).to(value.dtype)
        for key, value in Mixed().state_dict().items()
        if not key.startswith(absent or ("-",))
    }
    torch.manual_seed(3)
    eager = Mixed()
    final = torch.get_rng_state()
    eager.load_state_dict(stored, strict=False)

    model = build(Mixed)
    report = di.materialize(model, "cpu", weights=stored, seed=3, missing="any")
    assert report.ok
    for name, tensor in everything(eager).items():
        assert torch.equal(everything(model)[name], tensor), name
    if any("weight" in name or name.endswith(".") for name in absent):
        assert torch.equal(torch.get_rng_state(), final)


@pytest.mark.parametrize("build", HOW, ids=["meta", "recorded"])
def test_draws_are_counted_where_there_are_some(build: Any) -> None:
    model = build(Mixed)
    with profile() as profiled:
        di.materialize(model, "cpu")
    assert num_draws(profiled) == 4


@pytest.mark.parametrize("build", HOW, ids=["meta", "recorded"])
def test_a_complete_checkpoint_draws_no_random_numbers(build: Any) -> None:
    stored = dict(Mixed().state_dict())
    model = build(Mixed)
    before = torch.get_rng_state()
    with profile() as profiled:
        report = di.materialize(model, "cpu", weights=stored)
    assert num_draws(profiled) == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.inv_freq, 1.0 / torch.arange(1.0, 5.0))
    assert report.ok


class RandomBuffers(nn.Module):
    """Buffers that are not saved: drawn, computed from a weight, and neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("drawn", torch.randn(3), persistent=False)
        total = self.linear.weight.detach().sum()
        self.register_buffer("total", total, persistent=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_random_buffers_that_are_not_saved_get_eagers_values() -> None:
    stored = {
        key: torch.ones(v.shape) for key, v in RandomBuffers().state_dict().items()
    }
    torch.manual_seed(12)
    eager = RandomBuffers()
    eager.load_state_dict(stored)
    model = di.deferred_init(RandomBuffers)
    di.materialize(model, "cpu", weights=stored, seed=12)
    for name, tensor in everything(eager).items():
        assert torch.equal(everything(model)[name], tensor), name


@pytest.mark.parametrize("build", HOW, ids=["meta", "recorded"])
def test_by_name_what_is_missing_does_not_depend_on_what_is_loaded(build: Any) -> None:
    without = build(Mixed)
    di.materialize(without, "cpu", rng="by_name", seed=3)
    stored = dict(Mixed().state_dict())
    del stored["last.weight"]
    model = build(Mixed)
    di.materialize(model, "cpu", weights=stored, rng="by_name", seed=3)
    assert torch.equal(model.last.weight, without.last.weight)
    assert torch.equal(model.first.weight, stored["first.weight"])


def test_a_recipe_fills_what_is_missing_and_never_what_is_loaded() -> None:
    stored = dict(stack().state_dict())
    del stored["2.weight"]
    model = on_meta(stack)
    recipe = di.Recipe.load("gpt2")
    report = di.materialize(model, "cpu", recipe, weights=stored, seed=0)
    assert report.ok
    for key, value in stored.items():
        loaded = model.state_dict()[key]
        assert torch.equal(loaded, value.to(loaded.dtype)), key


def test_a_recipe_that_lacks_sizes_is_no_problem_if_everything_is_loaded() -> None:
    recipe = di.Recipe.load("mup")
    model = on_meta(stack)
    with pytest.raises(di.PlanError, match="recipe `mup`"):
        di.materialize(model, "cpu", recipe)
    state = dict(stack().state_dict())
    di.materialize(model, "cpu", recipe, weights=state)
    assert torch.equal(model[1].bias, state["1.bias"].to(model[1].bias.dtype))


def test_a_transformer_that_initializes_itself_again_keeps_what_is_loaded() -> None:
    """`nn.Transformer` writes all its parameters once more at the end."""

    def build() -> nn.Module:
        return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    state = dict(build().state_dict())
    for absent in ((), ("decoder.norm.weight", "encoder.layers.0.linear1.weight")):
        stored = {key: value for key, value in state.items() if key not in absent}
        torch.manual_seed(0)
        eager = build()
        eager.load_state_dict(stored, strict=False)
        model = on_meta(build)
        di.materialize(model, "cpu", weights=stored, seed=0)
        for key, value in eager.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key


def test_identity_flags_attributes_and_optimizers_survive_loading() -> None:
    model = on_meta(stack)
    weight = model[0].weight
    weight.requires_grad_(False)
    weight.tensor_model_parallel = True
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    state = dict(stack().state_dict())
    di.materialize(model, "cpu", weights=state, optimizers=[optimizer])
    assert model[0].weight is weight
    assert not weight.requires_grad
    assert weight.tensor_model_parallel
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[3].bias, state["3.bias"])

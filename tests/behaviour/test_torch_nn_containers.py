"""Modules of `torch.nn` made of others: flat weights, stacks, attention, ties."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import assert_same
from tests.behaviour.torch_nn_classes import stack


def test_an_rnn_keeps_its_flat_weights_the_same_objects_and_runs() -> None:
    torch.manual_seed(1)
    expected = nn.LSTM(3, 4, 2)
    model = nn.LSTM(3, 4, 2, device="meta")
    flat = list(model._flat_weights)
    di.materialize(model, "cpu", seed=1)
    assert all(a is b for a, b in zip(model._flat_weights, flat, strict=True))
    assert all(
        a is b
        for a, b in zip(model._flat_weights, list(model.parameters()), strict=True)
    )
    x = torch.ones(2, 1, 3)
    assert torch.equal(model(x)[0], expected(x)[0])


def test_all_layers_of_a_stack_begin_with_equal_values_of_one_draw() -> None:
    model = stack(device="meta")
    report = di.materialize(model, "cpu", seed=2)
    first = dict(model.layers[0].named_parameters())
    for layer in model.layers[1:]:
        for name, param in layer.named_parameters():
            assert torch.equal(param, first[name])
            assert param is not first[name]
    assert any("layer that TransformerEncoder copied" in t for t in report.assumptions)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stack_with_one_loaded_layer_gives_the_others_eager_values(
    layer: int,
) -> None:
    torch.manual_seed(2)
    expected = stack()
    model = stack(device="meta")
    loaded = {
        f"layers.{layer}.{name}": torch.full_like(p, 7.0)
        for name, p in expected.layers[layer].named_parameters()
        if name.endswith("weight")
    }
    model.load_state_dict(loaded, strict=False, assign=True)
    di.materialize(model, "cpu", seed=2)
    for name, param in model.named_parameters():
        if name in loaded:
            assert param.eq(7).all()
        else:
            assert torch.equal(param, expected.get_parameter(name))


def test_attention_with_loaded_input_projection_still_zeroes_the_output_bias() -> None:
    torch.manual_seed(2)
    expected = nn.MultiheadAttention(8, 2)
    model = nn.MultiheadAttention(8, 2, device="meta")
    loaded = {
        "in_proj_weight": torch.ones(24, 8),
        "in_proj_bias": torch.ones(24),
    }
    model.load_state_dict(loaded, strict=False, assign=True)
    di.materialize(model, "cpu", seed=2)
    assert model.in_proj_weight.eq(1).all()
    assert torch.equal(model.out_proj.weight, expected.out_proj.weight)
    assert model.out_proj.bias.eq(0).all()


def test_attention_leaves_a_loaded_output_bias_alone() -> None:
    model = nn.MultiheadAttention(8, 2, device="meta")
    loaded = {"out_proj.bias": torch.full((8,), 3.0)}
    model.load_state_dict(loaded, strict=False, assign=True)
    bias = model.out_proj.bias
    di.materialize(model, "cpu", seed=2)
    assert model.out_proj.bias is bias
    assert bias.eq(3).all()


def test_a_tied_head_draws_what_its_constructor_drew() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(5, 5))
        model[1].weight = model[0].weight
        return model

    torch.manual_seed(0)
    expected = build()
    with torch.device("meta"):
        model = build()
    report = di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)
    assert any("`1.weight`: shared with" in text for text in report.assumptions)

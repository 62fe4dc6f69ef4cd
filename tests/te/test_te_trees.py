"""Transformer Engine's layers among others: ties, parents with an init, parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = pytest.mark.te


def _tied_head(te: Any, device: str) -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Embedding(11, 8, device=device)
    model.layer = te.Linear(8, 8, device=device)
    model.head = te.Linear(8, 11, bias=False, device=device)
    model.head.weight = model.embedding.weight
    model.last = te.Linear(8, 8, device=device)
    return model


def _shared_layer(te: Any, device: str) -> nn.Module:
    layer = te.LayerNormMLP(8, 16, device=device)
    return nn.Sequential(layer, te.Linear(8, 8, device=device), layer)


def _parent_with_an_init(te: Any, device: str) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                te.LayerNormMLP(8, 16, device=device) for _ in range(2)
            )
            self.norm = nn.LayerNorm(8, device=device)
            self.out = nn.Linear(8, 8, device=device)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, te.LayerNormMLP):
                nn.init.normal_(module.fc1_weight, std=0.02)

    return Model()


def _experts_loaded_in_part(te: Any, device: str) -> nn.Module:
    grouped = te.ops.GroupedLinear(3, 8, 8, device=device)
    grouped.weight1 = nn.Parameter(torch.full((8, 8), 2.0))
    grouped.bias0 = nn.Parameter(torch.full((8,), 2.0))
    return te.ops.Sequential(grouped, te.ops.BasicLinear(8, 8, device=device))


TREES: dict[str, Callable[[Any, str], nn.Module]] = {
    "tied head": _tied_head,
    "shared layer": _shared_layer,
    "parent with an init": _parent_with_an_init,
    "experts loaded in part": _experts_loaded_in_part,
}


def _cases() -> list[Any]:
    needs = te_needs("ops.GroupedLinear")
    return [
        pytest.param(kind, marks=needs if make is _experts_loaded_in_part else ())
        for kind, make in TREES.items()
    ]


@pytest.mark.parametrize("kind", _cases())
def test_it_equals_eager_and_so_does_the_generator(te: Any, kind: str) -> None:
    model = TREES[kind](te, "meta")
    held = [id(param) for param in model.parameters()]
    report = di.materialize(model, "cpu", seed=0, verify="full")
    assert not report.assumptions
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = TREES[kind](te, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert [id(param) for param in model.parameters()] == held
    others = dict(twin.named_parameters())
    assert list(others) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert torch.equal(param, others[name]), name


def test_seeds_by_name_make_a_part_alone_as_in_the_whole(te: Any) -> None:
    whole = _shared_layer(te, "meta")
    di.materialize(whole, "cpu", seed=0, rng="by_name")
    part = nn.Sequential(nn.Identity(), te.Linear(8, 8, device="meta"))
    di.materialize(part, "cpu", seed=0, rng="by_name")
    assert torch.equal(whole[1].weight, part[1].weight)


def test_a_copy_of_a_model_on_meta_is_made_with_it(te: Any) -> None:
    with on_meta():
        model = te.TransformerLayer(16, 32, 2, softmax_type="learnable")
    twin = copy.deepcopy(model)
    assert di.materialize([model, twin], "cpu", seed=0).ok
    assert not any(p.is_meta for each in (model, twin) for p in each.parameters())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}


@te_needs("records of registered parameters")
def test_a_layer_that_was_real_and_sent_to_meta_is_made_again(te: Any) -> None:
    model = nn.Sequential(te.Linear(8, 8, device="cpu"), te.RMSNorm(8, device="cpu"))
    model.to("meta")
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, te.Linear(8, 8, device="cpu").weight)
    assert torch.equal(model[1].weight, torch.ones(8))

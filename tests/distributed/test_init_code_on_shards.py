"""Init code of all kinds sees full tensors: recipes, parents, whole transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backend import DEVICE, generator_states
from models import Net, compare, eager, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init import Recipe
from deferred_init.init_sizes import InitSizes

Ranks = Callable[[int], RankPool]


def _rules(_rank: int, preset: str) -> None:
    warnings.simplefilter("ignore")
    recipe = Recipe.load(preset)
    sizes = InitSizes(num_layers=2, hidden_size=5)
    recipe = replace(recipe, init_sizes=sizes)
    torch.manual_seed(0)
    expected: Any = di.deferred_init(Net)
    di.materialize(expected, DEVICE, recipe, seed=5)
    model: Any = di.deferred_init(Net)
    shard(model, "fsdp")
    di.materialize(model, DEVICE, recipe, seed=5)
    compare(model, expected)


@pytest.mark.parametrize("recipe", ["gpt2", "llama", "small_init", "bf16"])
def test_the_rules_of_a_recipe_see_full_tensors(ranks: Ranks, recipe: str) -> None:
    ranks(2).run(_rules, recipe)


class Scaled(nn.Module):
    """A parent that halves what its child made: it has to read it first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for child in (self.first, self.second):
                child.weight.mul_(0.5)
                child.bias.data.zero_()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def _scaled(_rank: int) -> None:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        expected: Any = Scaled()
        model: Any = Scaled()
    di.materialize(expected, DEVICE, seed=5)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=5)
    compare(model, expected)
    compare(model, eager(Scaled, 5))


def test_a_parent_that_scales_what_children_made_equals_eager(ranks: Ranks) -> None:
    ranks(2).run(_scaled)


def _transformer(_rank: int, built: str) -> None:
    warnings.simplefilter("ignore")

    def make() -> Any:
        return nn.Transformer(8, 2, 2, 1, 16, batch_first=True)

    expected = eager(make, 3)
    state = generator_states()
    if built == "recorded":
        model: Any = di.deferred_init(make)
    else:
        with torch.device("meta"):
            model = make()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=3)
    compare(model, expected)
    assert torch.equal(generator_states(), state)


@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_a_sharded_transformer_whose_root_redraws_everything_equals_eager(
    ranks: Ranks, built: str
) -> None:
    ranks(2).run(_transformer, built)

"""Initialization rules in `materialize`: eager construction, then the rules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deferred_init import PlanError, Recipe, deferred_init, materialize, plan
from deferred_init.comparison import compare
from deferred_init.handlers.recipe_rules import apply_init_rules


class Tiny(nn.Module):
    """A model with a tie, a padding row, a norm, biases and a config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=8, hidden_size=16)
        self.embed = nn.Embedding(11, 16, padding_idx=3)
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(16, 32), "down_proj": nn.Linear(32, 16)}
        )
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 11, bias=False)
        self.lm_head.weight = self.embed.weight


def _deferred(build: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _eager(build: type[nn.Module], recipe: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    model = build()
    apply_init_rules(model, Recipe.load(recipe))
    return model, torch.get_rng_state()


@pytest.mark.parametrize("build", [_deferred, deferred_init])
@pytest.mark.parametrize("recipe", ["gpt2", "llama", "mup", "small_init"])
def test_a_scheme_gives_what_eager_construction_and_the_rules_give(
    recipe: str, build: Callable[[type[nn.Module]], nn.Module]
) -> None:
    model = build(Tiny)
    materialize(model, "cpu", recipe, seed=5)
    state = torch.get_rng_state()
    eager, eager_state = _eager(Tiny, recipe)
    assert compare(model, eager).ok
    assert torch.equal(state, eager_state)


def test_the_rules_change_what_they_match_and_nothing_else() -> None:
    eager, _ = _eager(Tiny, "gpt2")
    torch.manual_seed(5)
    unruled = compare(Tiny(), eager)
    assert set(unruled.unequal) == {
        "embed.weight",
        "lm_head.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }


def test_the_padding_row_of_an_embedding_stays_zero() -> None:
    model = _deferred(Tiny)
    materialize(model, "cpu", "llama", seed=5)
    assert isinstance(model.embed, nn.Embedding)
    assert not model.embed.weight[3].any()
    assert model.embed.weight[2].all()


def test_dtypes_are_cast_after_the_rules() -> None:
    model = _deferred(Tiny)
    materialize(model, "cpu", "bf16+gpt2", seed=5)
    eager, _ = _eager(Tiny, "gpt2")
    assert compare(model, eager.to(torch.bfloat16)).ok


def test_a_parameter_that_no_module_can_fill_is_made_by_its_rule() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, 4))

    model = _deferred(Scale)
    with pytest.raises(PlanError, match="scale"):
        materialize(model, "cpu")
    materialize(model, "cpu", "llama", seed=5)
    torch.manual_seed(5)
    assert isinstance(model.scale, nn.Parameter)
    assert torch.equal(model.scale, nn.init.normal_(torch.empty(4, 4), std=0.02))


def test_a_loaded_parameter_is_left_alone() -> None:
    model = _deferred(Tiny)
    loaded = torch.full((32, 16), 7.0)
    model.load_state_dict({"mlp.up_proj.weight": loaded}, strict=False, assign=True)
    materialize(model, "cpu", "llama", seed=5)
    assert bool((model.get_parameter("mlp.up_proj.weight") == 7.0).all())
    assert not (model.get_parameter("mlp.down_proj.weight") == 7.0).any()


def test_a_size_that_nobody_gives_is_a_plan_error_that_names_it() -> None:
    model = _deferred(Tiny)
    del model.config
    with pytest.raises(PlanError) as caught:
        materialize(model, "cpu", "gpt2")
    assert (
        "recipe `gpt2`: the rule for `*.down_proj.weight` needs num_layers; set it "
        "under [init.sizes]" in str(caught.value)
    )
    assert model.get_parameter("norm.weight").is_meta


def test_the_plan_shows_the_rules_as_the_last_step() -> None:
    steps = plan(_deferred(Tiny), "cpu", "bf16+gpt2").to_dict()["steps"]
    assert steps[-1]["source"] == "recipe bf16+gpt2"
    assert steps[-1]["rewrites"] == 3


def test_each_of_several_models_gets_the_rules() -> None:
    models = [_deferred(Tiny), _deferred(Tiny)]
    materialize(models, "cpu", "llama", seed=5)
    for model in models:
        assert 0.015 < model.get_parameter("mlp.up_proj.weight").std().item() < 0.025

"""Recipes against the real classes of Transformer Engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from te_capabilities import te_needs

from deferred_init.errors import PlanError
from deferred_init.recipe import Recipe
from deferred_init.te_recipe import _KNOWN, TERecipeSpec, is_te_recipe

te_recipes = pytest.importorskip(
    "transformer_engine.common.recipe", reason="needs Transformer Engine"
)
pytestmark = pytest.mark.te
later_options = te_needs("recipes with backward_override")


@pytest.mark.parametrize(
    "name", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]
)
def test_a_preset_makes_the_recipe_with_transformer_engine_s_defaults(
    name: str,
) -> None:
    te_recipe = Recipe.load(name).make_te_recipe()
    assert is_te_recipe(te_recipe)
    assert te_recipe == type(te_recipe)()


def test_options_reach_the_recipe_object() -> None:
    text = """
    name = "mine"
    [te_recipe]
    name = "DelayedScaling"
    [te_recipe.options]
    fp8_format = "E4M3"
    amax_history_len = 16
    """
    te_recipe = Recipe.from_toml(text).make_te_recipe()
    assert te_recipe.fp8_format is te_recipes.Format.E4M3
    assert te_recipe.amax_history_len == 16


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "DelayedScaling" else later_options)
        for name in sorted(_KNOWN)
    ],
)
def test_every_known_option_is_a_field_of_the_class(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(getattr(te_recipes, name))}
    assert set(_KNOWN[name].options) <= fields


@pytest.mark.parametrize(
    ("te_recipe", "kind"),
    [
        (te_recipes.DelayedScaling(margin=1), "delayed"),
        (te_recipes.Float8CurrentScaling(), "current"),
        (te_recipes.Float8BlockScaling(), "block"),
        (te_recipes.MXFP8BlockScaling(), "mxfp8"),
        (te_recipes.NVFP4BlockScaling(disable_rht=True), "nvfp4"),
    ],
)
def test_a_live_recipe_is_accepted_kept_and_survives_a_round_trip(
    te_recipe: Any, kind: str
) -> None:
    recipe = Recipe.load(te_recipe)
    assert recipe.te_recipe is not None
    assert recipe.te_recipe.kind == kind
    assert recipe.make_te_recipe() is te_recipe
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    assert again.make_te_recipe() == te_recipe


def test_a_custom_recipe_is_accepted_without_a_claim_about_hardware() -> None:
    te_recipe = te_recipes.CustomRecipe(qfactory=lambda role: None)
    recipe = Recipe.load(te_recipe)
    assert recipe.te_recipe is not None
    assert recipe.te_recipe.kind == "custom"
    assert recipe.te_recipe.min_compute_capability is None
    assert recipe.unsupported_reason((7, 0)) is None
    with pytest.raises(ValueError, match="`CustomRecipe` is not plain data"):
        recipe.to_toml()


def test_a_live_recipe_with_a_function_cannot_be_written() -> None:
    te_recipe = te_recipes.DelayedScaling(amax_compute_algo=lambda history: history[0])
    with pytest.raises(ValueError, match="cannot be written as TOML: `amax_compute_"):
        Recipe.load(te_recipe).to_toml()


def test_what_transformer_engine_refuses_is_a_plan_error() -> None:
    spec = TERecipeSpec(
        name="Float8BlockScaling",
        options=(("x_block_scaling_dim", 2), ("w_block_scaling_dim", 2)),
    )
    with pytest.raises(
        PlanError, match=r"(?s)refuses `Float8BlockScaling` with .*2D by 2D"
    ):
        spec.make()


def test_a_class_that_this_release_lacks_is_a_plan_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(te_recipes, "NVFP4BlockScaling")
    with pytest.raises(PlanError, match="has no `NVFP4BlockScaling`; install a newer"):
        Recipe.load("nvfp4").make_te_recipe()

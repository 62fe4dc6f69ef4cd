"""Recipes: loading, composition, round trip, and what they say of a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deferred_init.dtype_policy import DTYPES, DtypePolicy
from deferred_init.init_rules import InitRule
from deferred_init.init_sizes import EXPRESSIONS, InitSizes
from deferred_init.recipe import Recipe, preset_names
from deferred_init.te_recipe import TERecipeSpec

FORMATS = ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
SCHEMES = ("gpt2", "llama", "mup", "small_init")


def test_the_presets_are_the_six_formats_and_four_schemes() -> None:
    assert preset_names() == tuple(sorted(FORMATS + SCHEMES))


@pytest.mark.parametrize("name", FORMATS + SCHEMES)
def test_every_preset_loads_under_its_own_name_and_says_what_it_is(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.description


@pytest.mark.parametrize("name", FORMATS + SCHEMES)
def test_every_preset_survives_a_round_trip(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize("name", FORMATS + SCHEMES)
def test_every_preset_file_names_its_source(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes"
    assert "# Source: " in (folder / f"{name}.toml").read_text() or name == "bf16"


def test_none_is_the_recipe_that_keeps_the_model_as_it_was_built() -> None:
    recipe = Recipe.load(None)
    assert recipe == Recipe(name=recipe.name, description=recipe.description)
    assert recipe.make_te_recipe() is None
    assert recipe.dtype.parameter is None


def test_a_recipe_loads_as_itself() -> None:
    recipe = Recipe(name="mine")
    assert Recipe.load(recipe) is recipe


def test_a_file_loads_by_path_object_and_by_string(tmp_path: Path) -> None:
    path = tmp_path / "a+b.toml"
    path.write_text('name = "mine"\n[dtype]\nparameter = "float16"\n')
    assert Recipe.load(path) == Recipe.load(str(path))
    assert Recipe.load(path).dtype.parameter is torch.float16


def test_a_file_may_be_part_of_a_composition(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ninference = true\n')
    recipe = Recipe.load(f"fp8_current+{path}")
    assert recipe.inference
    assert recipe.name == "fp8_current+mine"


def test_a_composition_takes_each_part_from_whoever_sets_it() -> None:
    recipe = Recipe.load("fp8_current + llama+bf16")
    assert recipe.te_recipe is not None
    assert recipe.te_recipe.kind == "current"
    assert recipe.quantize_weights
    assert recipe.init_rules == Recipe.load("llama").init_rules
    assert recipe.dtype.parameter is torch.bfloat16
    assert recipe.dtype.buffer is None
    assert recipe.name == "fp8_current+llama+bf16"


def test_a_composition_joins_the_modules_that_stay_in_high_precision() -> None:
    ours = Recipe(name="a", high_precision_modules=("x", "y"))
    theirs = Recipe(name="b", high_precision_modules=("y", "z"))
    assert ours.combine(theirs).high_precision_modules == ("x", "y", "z")


def test_the_first_rule_that_matches_counts() -> None:
    recipe = Recipe.load("gpt2")
    residual = recipe.rule_for("h.0.attn.c_proj.weight", 2)
    other = recipe.rule_for("h.0.attn.c_attn.weight", 2)
    assert residual is not None
    assert residual.scale_by == "1/sqrt(2*num_layers)"
    assert other is not None
    assert other.scale_by is None
    assert recipe.rule_for("h.0.ln_1.weight", 1) is None


def test_modules_stay_in_high_precision_by_pattern() -> None:
    recipe = Recipe(name="x", high_precision_modules=("lm_head", "*.router"))
    assert recipe.keeps_high_precision("layers.0.router")
    assert recipe.keeps_high_precision("lm_head")
    assert not recipe.keeps_high_precision("layers.0.mlp")


_TEXT = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Z", "Cc"]),
    max_size=20,
)
_RULE = st.builds(
    InitRule,
    match=_TEXT,
    distribution=st.just("normal"),
    min_ndim=st.integers(0, 4),
    options=st.fixed_dictionaries(
        {
            "std": st.floats(0, 10, allow_nan=False)
            | st.sampled_from(sorted(EXPRESSIONS))
        },
        optional={"mean": st.floats(-1, 1)},
    ).map(lambda options: tuple(options.items())),
    scale_by=st.none() | st.sampled_from(sorted(EXPRESSIONS)),
)
_SIZE = st.none() | st.integers(1, 10**6)
_DTYPE = st.none() | st.sampled_from(sorted(DTYPES)).map(lambda name: DTYPES[name])


@settings(deadline=None)  # the first example imports
@given(
    recipe=st.builds(
        Recipe,
        name=_TEXT,
        description=_TEXT,
        te_recipe=st.none()
        | st.builds(
            TERecipeSpec,
            name=st.just("DelayedScaling"),
            options=st.tuples(
                st.tuples(st.just("margin"), st.integers(0, 4)),
                st.tuples(st.just("fp8_mha"), st.booleans()),
            ),
        ),
        inference=st.booleans(),
        dtype=st.builds(DtypePolicy, parameter=_DTYPE, norm=_DTYPE, buffer=_DTYPE),
        high_precision_modules=st.lists(_TEXT, max_size=3).map(tuple),
        init_rules=st.lists(_RULE, max_size=3).map(tuple),
        init_sizes=st.builds(
            InitSizes, num_layers=_SIZE, hidden_size=_SIZE, base_hidden_size=_SIZE
        ),
    )
)
def test_any_recipe_survives_a_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("own", "is_buffer", "in_norm", "expected"),
    [
        (torch.float32, False, False, torch.bfloat16),
        (torch.float32, False, True, torch.float32),
        (torch.float16, False, True, torch.float32),
        (torch.float32, True, False, torch.float32),
        (torch.int64, False, False, torch.int64),
        (torch.complex64, False, False, torch.complex64),
    ],
)
def test_a_dtype_policy_speaks_of_floating_point_tensors_by_kind(
    own: torch.dtype, is_buffer: bool, in_norm: bool, expected: torch.dtype
) -> None:
    policy = DtypePolicy(parameter=torch.bfloat16, norm=torch.float32)
    assert policy.target(own, is_buffer=is_buffer, in_norm=in_norm) is expected

"""Recipes that are refused: unknown, contradicting, malformed, for other hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deferred_init.dtype_policy import DtypePolicy
from deferred_init.errors import PlanError
from deferred_init.recipe import Recipe
from deferred_init.te_recipe import TERecipeSpec


def test_a_composition_of_contradicting_recipes_lists_all_contradictions() -> None:
    ours = Recipe(name="a", dtype=DtypePolicy(parameter=torch.float16))
    theirs = Recipe.load("bf16+gpt2")
    ours = ours.combine(Recipe.load("llama"))
    with pytest.raises(PlanError) as caught:
        ours.combine(theirs)
    assert str(caught.value) == (
        "the recipes `a+llama` and `bf16+gpt2` both set `init_rules` and "
        "`dtype.parameter`, and differently; use one of them, or write a recipe file"
    )
    assert caught.value.problems == ("init_rules", "dtype.parameter")


def test_two_formats_cannot_be_composed() -> None:
    with pytest.raises(PlanError, match="both set `te_recipe`"):
        Recipe.load("fp8_current+fp8_block")


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(PlanError) as caught:
        Recipe.load("fp8_curent")
    assert str(caught.value) == (
        "no recipe is called `fp8_curent`; did you mean `fp8_current`? "
        "A file is given by its path, ending in .toml."
    )


def test_an_empty_part_of_a_composition_is_refused() -> None:
    with pytest.raises(PlanError, match="no recipe is called ``; known: `bf16`") as it:
        Recipe.load("fp8_current+")
    assert "`. A file is given by its path, ending in .toml." in str(it.value)


def test_a_missing_file_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml cannot be read: No such file"):
        Recipe.load(tmp_path / "none.toml")


def test_a_value_that_is_no_recipe_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="found int"):
        Recipe.load(8)


def test_text_that_is_no_toml_is_refused_with_its_source() -> None:
    with pytest.raises(PlanError, match=r"mine is not valid TOML: Invalid value"):
        Recipe.from_toml("name = ", source="mine")


def test_all_problems_of_a_file_are_listed_at_once() -> None:
    text = """
    title = "x"
    quantise_weights = true
    inference = 1
    high_precision_modules = "lm_head"
    [te_recipe]
    name = "DelayedScaling"
    [te_recipe.options]
    amax_history_length = 16
    margin = true
    fp8_format = "E5M2"
    [dtype]
    parameter = "bf16"
    weights = "float32"
    [init.sizes]
    num_layers = 0
    depth = 3
    [[init.rules]]
    match = "*"
    distribution = "norml"
    [[init.rules]]
    match = "*.weight"
    distribution = "normal"
    sdt = 0.02
    [[init.rules]]
    distribution = "zeros"
    """
    with pytest.raises(PlanError) as caught:
        Recipe.from_toml(text, source="mine.toml")
    assert str(caught.value).startswith("13 problems in mine.toml: ")
    assert caught.value.problems[0].startswith("unknown key `title`; known: ")
    for expected in (
        "unknown key `quantise_weights`; did you mean `quantize_weights`?",
        "`inference` must be true or false, found 1",
        "`name` is missing",
        "`high_precision_modules` must be a list of strings, found 'lm_head'",
        "`DelayedScaling.fp8_format` must be one of ['E4M3', 'HYBRID'], "
        "found 'E5M2'; `DelayedScaling.margin` must be an integer, found True",
        "`dtype.parameter` is 'bf16'; did you mean `bfloat16`?",
        "unknown key `dtype.weights`; known: `parameter`, `norm`, `buffer`",
        "unknown key `init.sizes.depth`",
        "init.sizes: `num_layers` must be a positive integer, found 0",
        "init.rules[0]: no distribution `norml`; did you mean `normal`?",
        "init.rules[1]: `normal` has no option `sdt`; did you mean `std`?; "
        "`normal` needs `std`",
        "`init.rules[2].match` must be a string",
    ):
        assert any(expected in problem for problem in caught.value.problems), expected


def test_one_problem_is_counted_in_the_singular() -> None:
    with pytest.raises(PlanError, match="1 problem in the recipe: `name` is missing"):
        Recipe.from_toml("inference = true")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("te_recipe = 1", "`te_recipe` must be a table, found 1"),
        ("[te_recipe]\nname = 1", "`te_recipe.name` must name a TE recipe class"),
        ('[te_recipe]\nname = "X"', "no TE recipe class `X`; known: `DelayedScaling`"),
        ("[init]\nrules = 1", "`init.rules` must be an array of tables"),
        ("name = 3", "`name` must be a string, found 3"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused(text: str, expected: str) -> None:
    if not text.startswith("name"):
        text = 'name = "x"\n' + text
    with pytest.raises(PlanError) as caught:
        Recipe.from_toml(text)
    assert expected in str(caught.value)


def test_fields_that_contradict_each_other_are_refused_together() -> None:
    text = 'name = "x"\nkeep_high_precision_init = true'
    with pytest.raises(PlanError, match="`keep_high_precision_init` needs `quantize_"):
        Recipe.from_toml(text)
    with pytest.raises(ValueError, match="`quantize_weights` needs a `te_recipe`"):
        Recipe(name="x", quantize_weights=True)


def test_a_dtype_that_is_not_floating_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`dtype\.buffer` must be one of \['float64'"):
        DtypePolicy(buffer=torch.int8)


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("bf16", (8, 0), None),
        ("fp8_current", (8, 9), None),
        (
            "fp8_delayed",
            (8, 0),
            "`DelayedScaling` needs compute capability 8.9 or higher, found 8.0",
        ),
        ("fp8_block", (9, 0), None),
        (
            "fp8_block",
            (8, 9),
            "`Float8BlockScaling` needs compute capability 9.0 or higher, found 8.9",
        ),
        (
            "mxfp8",
            (9, 0),
            "`MXFP8BlockScaling` needs compute capability 10.0 or higher, found 9.0",
        ),
        ("mxfp8", (10, 0), None),
        (
            "mxfp8",
            (12, 0),
            "`MXFP8BlockScaling` does not run on compute capability 12.0 or higher "
            "yet, found 12.0",
        ),
        (
            "nvfp4",
            (9, 0),
            "`NVFP4BlockScaling` needs compute capability 10.0 or higher, found 9.0",
        ),
        ("nvfp4", (12, 0), None),
    ],
)
def test_hardware_that_cannot_run_a_recipe_is_named(
    name: str, capability: tuple[int, int], reason: str | None
) -> None:
    assert Recipe.load(name).unsupported_reason(capability) == reason


def test_a_missing_transformer_engine_is_a_plan_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # None in sys.modules makes the import fail, whether it is installed or not.
    monkeypatch.setitem(sys.modules, "transformer_engine.common", None)
    with pytest.raises(
        PlanError, match=r"needs Transformer Engine, .*`deferred-init d"
    ):
        Recipe.load("fp8_current").make_te_recipe()


def test_a_description_of_something_else_than_a_te_recipe_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a Transformer Engine recipe"):
        TERecipeSpec.from_te_recipe("fp8")

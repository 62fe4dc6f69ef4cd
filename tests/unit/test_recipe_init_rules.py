"""Initialization rules: the distributions that they claim, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

from deferred_init.init_rules import InitRule
from deferred_init.init_sizes import InitSizes
from deferred_init.recipe import Recipe

SIZES = InitSizes(num_layers=8, hidden_size=1024, base_hidden_size=256)


def _rule(distribution: str, scale_by: str | None = None, **options: Any) -> InitRule:
    return InitRule(
        match="*",
        distribution=distribution,
        scale_by=scale_by,
        options=tuple(options.items()),
    )


def _filled(rule: InitRule, shape: tuple[int, ...] = (256, 512)) -> torch.Tensor:
    torch.manual_seed(0)
    tensor = torch.full(shape, math.nan)
    rule.initializer(SIZES)(tensor)
    return tensor


def _agrees(tensor: torch.Tensor, distribution: Any) -> bool:
    """Kolmogorov-Smirnov at a level that a fixed seed passes or fails for good."""
    return bool(stats.kstest(tensor.flatten().numpy(), distribution.cdf).pvalue > 1e-3)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (_rule("normal", std=0.02), stats.norm(0, 0.02)),
        (_rule("normal", std=0.5, mean=1.0), stats.norm(1.0, 0.5)),
        (
            _rule("trunc_normal", std=0.5, a=-0.5, b=1.0),
            stats.truncnorm(-1, 2, 0, 0.5),
        ),
        (_rule("uniform", a=-1.0, b=3.0), stats.uniform(-1, 4)),
        (
            _rule("xavier_uniform"),
            stats.uniform(-math.sqrt(6 / 768), 2 * math.sqrt(6 / 768)),
        ),
        (_rule("xavier_normal", gain=2.0), stats.norm(0, 2 * math.sqrt(2 / 768))),
        (
            _rule("kaiming_uniform", a=math.sqrt(5)),
            stats.uniform(-1 / math.sqrt(512), 2 / math.sqrt(512)),
        ),
        (
            _rule("kaiming_normal", mode="fan_out", nonlinearity="relu"),
            stats.norm(0, math.sqrt(2 / 256)),
        ),
        (_rule("normal", "1/sqrt(2*num_layers)", std=0.02), stats.norm(0, 0.02 / 4)),
        (_rule("normal", "1/sqrt(num_layers)", std=1.0), stats.norm(0, 8**-0.5)),
        (_rule("normal", std="1/sqrt(hidden_size)"), stats.norm(0, 1 / 32)),
        (
            _rule("normal", "sqrt(base_hidden_size/hidden_size)", std=0.02),
            stats.norm(0, 0.01),
        ),
        (
            _rule("uniform", "1/sqrt(2*num_layers)", a=-4.0, b=4.0),
            stats.uniform(-1, 2),
        ),
        (
            _rule("xavier_normal", "1/sqrt(2*num_layers)"),
            stats.norm(0, math.sqrt(2 / 768) / 4),
        ),
    ],
)
def test_a_rule_draws_from_the_distribution_that_it_names(
    rule: InitRule, expected: Any
) -> None:
    assert _agrees(_filled(rule), expected)


def test_the_test_above_can_tell_a_wrong_deviation() -> None:
    assert not _agrees(_filled(_rule("normal", std=0.02)), stats.norm(0, 0.0205))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (_rule("zeros"), 0.0),
        (_rule("ones"), 1.0),
        (_rule("constant", val=2.5), 2.5),
        (_rule("constant", "1/sqrt(2*num_layers)", val=2.0), 0.5),
    ],
)
def test_a_rule_without_randomness_fills_with_one_value(
    rule: InitRule, value: float
) -> None:
    assert bool((_filled(rule) == value).all())


@pytest.mark.parametrize(
    ("preset", "fqn", "std"),
    [
        ("gpt2", "transformer.h.3.attn.c_attn.weight", 0.02),
        ("gpt2", "transformer.h.3.mlp.c_proj.weight", 0.02 / 4),
        ("gpt2", "layers.3.layernorm_mlp.fc2_weight", 0.02 / 4),
        ("gpt2", "layers.3.self_attention.proj.weight", 0.02 / 4),
        ("gpt2", "model.layers.3.self_attn.o_proj.weight", 0.02 / 4),
        ("gpt2", "model.layers.3.mlp.down_proj.weight", 0.02 / 4),
        ("llama", "model.layers.3.mlp.down_proj.weight", 0.02),
        ("mup", "model.embed_tokens.weight", 0.02),
        ("mup", "transformer.wte.weight", 0.02),
        ("mup", "transformer.wpe.weight", 0.02),
        ("mup", "lm_head.weight", 0.02),
        ("mup", "model.layers.3.mlp.down_proj.weight", 0.01),
        ("small_init", "gpt_neox.embed_in.weight", math.sqrt(2 / 5120)),
        ("small_init", "gpt_neox.layers.3.attention.dense.weight", 2 / 8 / 32),
        ("small_init", "gpt_neox.layers.3.mlp.dense_4h_to_h.weight", 2 / 8 / 32),
        ("small_init", "layers.3.layernorm_mlp.fc2_weight", 2 / 8 / 32),
    ],
)
def test_a_preset_draws_what_its_source_says(preset: str, fqn: str, std: float) -> None:
    recipe = Recipe.load(preset)
    rule = recipe.rule_for(fqn, 2)
    assert rule is not None
    torch.manual_seed(0)
    tensor = torch.empty(256, 512)
    rule.initializer(recipe.init_sizes.over(SIZES))(tensor)
    assert _agrees(tensor, stats.norm(0, std))


@pytest.mark.parametrize("preset", ["gpt2", "llama", "mup", "small_init"])
def test_a_preset_leaves_norms_and_biases_to_their_modules(preset: str) -> None:
    recipe = Recipe.load(preset)
    assert recipe.rule_for("model.layers.0.input_layernorm.weight", 1) is None
    assert recipe.rule_for("transformer.h.0.mlp.c_fc.bias", 1) is None


def test_filling_keeps_the_gradient_flag_and_the_object() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    _rule("normal", std=1.0).initializer(SIZES)(weight)
    assert weight.requires_grad
    assert weight.is_leaf
    assert bool((weight != 0).all())


def test_filling_draws_like_torch_and_leaves_the_same_generator_state() -> None:
    ours = _filled(_rule("normal", std=0.02), (33, 7))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    theirs = nn.init.normal_(torch.empty(33, 7), std=0.02)
    assert torch.equal(ours, theirs)
    assert torch.equal(state, torch.get_rng_state())


def test_a_rule_whose_size_is_unknown_says_which_and_where_to_set_it() -> None:
    rule = _rule("normal", "1/sqrt(2*num_layers)", std="1/sqrt(hidden_size)")
    with pytest.raises(ValueError) as caught:
        rule.initializer(InitSizes())
    assert str(caught.value) == (
        "the rule for `*` needs hidden_size, num_layers; set it under [init.sizes]"
    )


def test_the_sizes_are_read_from_a_hugging_face_style_config() -> None:
    class Config:
        num_hidden_layers = 3
        hidden_size = 5

    model = nn.Module()
    assert InitSizes.of(model) == InitSizes()
    model.config = Config()
    assert InitSizes.of(model) == InitSizes(num_layers=3, hidden_size=5)


def test_sizes_given_by_the_recipe_win_over_those_of_the_model() -> None:
    ours = InitSizes(num_layers=2)
    assert ours.over(SIZES) == InitSizes(
        num_layers=2, hidden_size=1024, base_hidden_size=256
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"distribution": "gauss"}, "no distribution `gauss`; known: `normal`"),
        (
            {"distribution": "zeros", "std": 1.0},
            "`zeros` takes no options, found `std`",
        ),
        ({"distribution": "normal", "std": -1.0}, "`std` must not be negative"),
        ({"distribution": "normal", "std": math.inf}, "`std` must be a finite number"),
        ({"distribution": "normal", "std": True}, "`std` must be a finite number"),
        ({"distribution": "normal", "std": [1]}, "`std` must be a finite number"),
        (
            {"distribution": "normal", "std": "1/sqrt(hidden)"},
            "`std` is '1/sqrt(hidden)', which is no expression; did you mean "
            "`1/sqrt(hidden_size)`?",
        ),
        (
            {"distribution": "normal", "std": 1.0, "mean": "1/sqrt(hidden_size)"},
            "`mean` is '1/sqrt(hidden_size)', which is no expression; give a number",
        ),
        (
            {"distribution": "kaiming_normal", "mode": "fan"},
            "`mode` must be one of ('fan_in', 'fan_out'), found 'fan'",
        ),
        (
            {"distribution": "zeros", "scale_by": "1/sqrt(num_layers)"},
            "`zeros` has no spread for `scale_by` to multiply",
        ),
        (
            {"distribution": "normal", "std": 1.0, "scale_by": "__import__('os')"},
            "no expression `__import__('os')` for `scale_by`; known: ",
        ),
        (
            {"distribution": "normal", "std": 1.0, "min_ndim": -1},
            "`min_ndim` must be an integer of at least 0, found -1",
        ),
    ],
)
def test_a_bad_rule_is_refused(arguments: dict[str, Any], expected: str) -> None:
    own = {
        key: arguments.pop(key)
        for key in ("distribution", "scale_by", "min_ndim")
        if key in arguments
    }
    with pytest.raises(ValueError) as caught:
        InitRule(match="*", options=tuple(arguments.items()), **own)
    assert expected in str(caught.value)

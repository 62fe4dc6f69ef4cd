"""Names and layouts that differ between a checkpoint and a model."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.sources import Stack
from tests.behaviour.equal_models import on_meta
from tests.weights.small_models import assert_holds


class Net(nn.Module):
    """Two layers, with names as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_known_wrappers_in_a_checkpoint_do_not_matter(prefix: str) -> None:
    state, model = dict(Net().state_dict()), on_meta(Net)
    di.materialize(model, "cpu", weights=prefixed(state, prefix), missing="error")
    assert_holds(model, state)


def test_a_compiled_submodule_loads_names_without_its_prefix() -> None:
    state = dict(Net().state_dict())
    model = on_meta(Net)
    inner = model.layers[1]
    model.layers[1] = nn.Module()
    model.layers[1].add_module("_orig_mod", inner)
    di.materialize(model, "cpu", weights=state, missing="error", unexpected="error")
    assert torch.equal(inner.weight, state["layers.1.weight"])


def test_a_pattern_and_a_template_rename_keys() -> None:
    state, model = dict(Net().state_dict()), on_meta(Net)
    foreign = {
        key.replace("layers.", "transformer.h_").replace("head", "lm_head"): value
        for key, value in state.items()
    }
    names = {r"^transformer\.h_(\d+)\.": r"layers.\1.", r"^lm_": ""}
    di.materialize(model, "cpu", weights=foreign, names=names, missing="error")
    assert_holds(model, state)


def test_only_the_first_pattern_that_matches_counts() -> None:
    model = nn.Linear(2, 2, bias=False, device="meta")
    weights = {"a.x": torch.ones(2, 2)}
    names = {r"^a\.x$": "weight", r"^weight$": "other"}
    di.materialize(model, "cpu", weights=weights, names=names)
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_two_keys_with_the_same_name_after_renaming_are_an_error() -> None:
    model = nn.Linear(2, 2, bias=False, device="meta")
    weights = {"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}
    with pytest.raises(di.PlanError, match=r"1 pairs of keys get the same name.*a\.w"):
        di.materialize(model, "cpu", weights=weights, names={r"^[ab]\.": ""})


def test_a_pattern_or_rule_that_fits_nothing_is_noted() -> None:
    model = nn.Linear(2, 2, bias=False, device="meta")
    rules = ({"^nobody": "x"}, Stack("nothing", "{index}"))
    report = di.materialize(
        model, "cpu", weights={"weight": torch.ones(2, 2)}, names=rules
    )
    assert any("no key matches the patterns `^nobody`" in note for note in report.notes)
    assert any("no tensor fits the rule Stack" in note for note in report.notes)


@pytest.mark.parametrize("side", ["embed.weight", "head.weight"])
def test_of_a_tie_the_checkpoint_may_store_either_side(side: str) -> None:
    model = on_meta(Tied)
    weight = torch.randn(5, 4)
    di.materialize(
        model, "cpu", weights={side: weight}, missing="error", unexpected="error"
    )
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.head.weight, weight)


def test_of_a_tie_stored_twice_one_side_is_read_and_it_is_noted() -> None:
    model = on_meta(Tied)
    state = dict(Tied().state_dict())
    report = di.materialize(model, "cpu", weights=state, unexpected="error")
    assert_holds(model, state)
    assert any("stores the tied `embed.weight` 2 times" in n for n in report.notes)


def test_a_tie_that_the_checkpoint_stores_with_different_values_is_an_error() -> None:
    """Else one of the two would silently be lost."""
    model = on_meta(Tied)
    state = {"embed.weight": torch.randn(5, 4), "head.weight": torch.randn(5, 4)}
    text = "stores with different values: `embed.weight and head.weight`. Build the "
    with pytest.raises(di.MaterializeError, match=re.escape(text)):
        di.materialize(model, "cpu", weights=state)
    assert model.embed.weight.is_meta
    names = {r"^head\.": "unused."}
    di.materialize(model, "cpu", weights=state, names=names)
    assert torch.equal(model.head.weight, state["embed.weight"])


def test_of_a_tie_the_side_with_the_right_shape_is_read() -> None:
    model = on_meta(Tied)
    weight = torch.randn(5, 4)
    state = {"embed.weight": torch.randn(6, 4), "head.weight": weight}
    di.materialize(model, "cpu", weights=state)
    assert torch.equal(model.embed.weight, weight)


def test_a_module_registered_twice_loads_from_either_name() -> None:
    for side in ("first", "second"):
        model = on_meta(nn.Module)
        model.first = nn.Linear(2, 3, device="meta")
        model.second = model.first
        state = prefixed(dict(nn.Linear(2, 3).state_dict()), f"{side}.")
        di.materialize(model, "cpu", weights=state, missing="error")
        assert torch.equal(model.second.weight, state[f"{side}.weight"])


def test_parts_of_a_model_given_together_load_by_their_own_names() -> None:
    state = dict(Net().state_dict())
    one, two = on_meta(Net), on_meta(Net)
    one.head, two.layers = nn.Identity(), nn.ModuleList()
    di.materialize([one, two], "cpu", weights=state, missing="error")
    assert torch.equal(one.layers[1].weight, state["layers.1.weight"])
    assert torch.equal(two.head.bias, state["head.bias"])


def test_arguments_about_names_are_checked() -> None:
    model = nn.Linear(3, 4, device="meta")
    state = {"weight": torch.ones(4, 3)}
    with pytest.raises(TypeError, match="expected mappings of pattern to template and"):
        di.materialize(model, "cpu", weights=state, names=["weight"])
    with pytest.raises(TypeError, match="expected a mapping or a sequence as `names`"):
        di.materialize(model, "cpu", weights=state, names="weight")
    with pytest.raises(ValueError, match="is no regular expression"):
        di.materialize(model, "cpu", weights=state, names={"[": ""})
    with pytest.raises(ValueError, match="pass weights= too"):
        di.materialize(model, "cpu", names={"a": "b"})

"""Names and layouts that differ between a checkpoint and a model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.handlers import checkpoint
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.sources import Fuse, Split, Stack, Transpose, Unstack


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


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert [key for key in state if not torch.equal(loaded[key], state[key])] == []


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


class Attention(nn.Module):
    """Projections apart, or joined."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        sizes = {"q": 8, "k": 4, "v": 4}
        if joined:
            self.qkv = nn.Linear(6, 16)
        else:
            for name, size in sizes.items():
                self.add_module(name, nn.Linear(6, size))


PARTS = [r"\1q.\2", r"\1k.\2", r"\1v.\2"]


@pytest.mark.parametrize("mmap", [True, False])
def test_projections_are_joined_and_cut(mmap: bool) -> None:
    apart = dict(Attention(joined=False).state_dict())
    weight = torch.cat([apart["q.weight"], apart["k.weight"], apart["v.weight"]])
    joined = on_meta(lambda: Attention(joined=True))
    fuse = Fuse(r"(.*)qkv\.(weight|bias)", PARTS)
    di.materialize(
        joined, "cpu", weights=apart, names=[fuse], missing="error", unexpected="error"
    )
    assert torch.equal(joined.qkv.weight, weight)

    again = on_meta(lambda: Attention(joined=False))
    state = dict(joined.state_dict())
    split = Split(r"(.*)qkv\.(weight|bias)", PARTS)
    di.materialize(
        again, "cpu", weights=state, names=[split], missing="error", unexpected="error"
    )
    assert_holds(again, apart)


def test_projections_are_joined_in_groups_as_megatron_interleaves_them() -> None:
    apart = dict(Attention(joined=False).state_dict())
    q, k, v = (apart[f"{name}.weight"] for name in "qkv")
    parts = [p.reshape(2, -1, 6) for p in (q, k, v)]  # 2 groups
    expected = torch.cat(parts, dim=1).reshape(16, 6)
    joined = on_meta(lambda: Attention(joined=True))
    fuse = Fuse(r"(.*)qkv\.(weight|bias)", PARTS, groups=2)
    di.materialize(joined, "cpu", weights=apart, names=[fuse])
    assert torch.equal(joined.qkv.weight, expected)

    again = on_meta(lambda: Attention(joined=False))
    split = Split(r"(.*)qkv\.(weight|bias)", PARTS, groups=2)
    di.materialize(again, "cpu", weights=dict(joined.state_dict()), names=[split])
    assert_holds(again, apart)


def test_tensors_are_joined_and_cut_along_an_inner_dim() -> None:
    parts = {"a": torch.randn(3, 2), "b": torch.randn(3, 5)}
    model = nn.Linear(7, 3, bias=False, device="meta")
    fuse = Fuse("weight", ["a", "b"], dim=1)
    di.materialize(model, "cpu", weights=parts, names=[fuse], dtype=torch.float64)
    assert torch.equal(model.weight, torch.cat([*parts.values()], dim=1).double())

    apart = nn.ParameterDict(
        {"a": torch.empty(3, 2, device="meta"), "b": torch.empty(3, 5, device="meta")}
    )
    split = Split("weight", ["a", "b"], dim=1)
    state = {"weight": torch.cat([*parts.values()], dim=1)}
    di.materialize(apart, "cpu", weights=state, names=[split])
    assert_holds(apart, parts)


class Experts(nn.Module):
    """Experts stacked in one tensor, or numbered as Transformer Engine does."""

    def __init__(self, stacked: bool, dim: int = 0) -> None:
        super().__init__()
        if stacked:
            shape = [4, 5]
            shape.insert(dim, 3)
            self.w1 = nn.Parameter(torch.randn(shape))
        else:
            for index in range(3):
                setattr(self, f"weight{index}", nn.Parameter(torch.randn(4, 5)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_experts_are_stacked_and_taken_apart(dim: int) -> None:
    apart = dict(Experts(stacked=False).state_dict())
    expected = torch.stack([apart[f"weight{i}"] for i in range(3)], dim=dim)
    stacked = on_meta(lambda: Experts(stacked=True, dim=dim))
    stack = Stack("w1", "weight{index}", dim=dim)
    di.materialize(
        stacked,
        "cpu",
        weights=apart,
        names=[stack],
        missing="error",
        unexpected="error",
    )
    assert torch.equal(stacked.w1, expected)

    again = on_meta(lambda: Experts(stacked=False))
    unstack = Unstack("w1", "weight{index}", dim=dim)
    state = dict(stacked.state_dict())
    di.materialize(again, "cpu", weights=state, names=[unstack], missing="error")
    assert_holds(again, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [True, False])
def test_matrices_that_are_stored_the_other_way_round_are_turned(
    small: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        options = EngineOptions(buffer_bytes=64)
        monkeypatch.setattr(checkpoint, "EngineOptions", lambda: options)
    stored = {"w.weight": torch.randn(30, 20), "e": torch.randn(2, 6, 5)}
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(20, 30, device="meta"))
    model.e = nn.Parameter(torch.empty(2, 5, 6, device="meta"))
    rules = [Transpose("weight", "w.weight"), Transpose("e")]
    di.materialize(model, "cpu", weights=stored, names=rules, dtype=dtype)
    assert torch.equal(model.weight, stored["w.weight"].t().to(dtype))
    assert torch.equal(model.e, stored["e"].mT.to(dtype))


@pytest.mark.parametrize(
    ("rule", "weights", "text"),
    [
        (
            Transpose("weight"),
            {"weight": torch.ones(3, 5)},
            r"`weight` has shape \(4, 3\), which `weight` \(3, 5\) is not the transp",
        ),
        (
            Fuse("weight", ["a", "b"]),
            {"a": torch.ones(2, 3)},
            r"`weight` is joined from `a`, `b`, but the checkpoint lacks `b`",
        ),
        (
            Fuse("weight", ["a", "b"]),
            {"a": torch.ones(2, 3), "b": torch.ones(1, 3)},
            r"`weight` has shape \(4, 3\) and cannot be joined along dim 0 in 1 "
            r"group\(s\) from `a` \(2, 3\), `b` \(1, 3\)",
        ),
        (
            Fuse("weight", ["a", "b"], groups=2),
            {"a": torch.ones(3, 3), "b": torch.ones(1, 3)},
            r"cannot be joined along dim 0 in 2 group\(s\)",
        ),
        (
            Split("big", ["weight", "other"]),
            {"big": torch.ones(6, 3)},
            r"`weight` is cut from `big` \(6, 3\) along dim 0 in 1 group\(s\), which "
            r"does not fit the model's `weight` \(4, 3\), `other` not there",
        ),
        (
            Stack("weight", "e{index}"),
            {"e0": torch.ones(3), "e2": torch.ones(3)},
            r"stacks 4 tensors, but the checkpoint lacks 2 of them: `e1`, `e3`",
        ),
        (
            Stack("weight", "e{index}"),
            {f"e{i}": torch.ones(3 + i % 2) for i in range(4)},
            r"stacks tensors of shape \(3,\), but 2 have others: `e1`, `e3`, the first "
            r"\(4,\)",
        ),
        (
            Unstack("big", "weight{index}".replace("{index}", "")),
            {"big": torch.ones(2, 5, 3)},
            r"`weight` has shape \(4, 3\), but is layer 1 along dim 0 of `big` "
            r"\(2, 5, 3\)",
        ),
    ],
)
def test_a_rule_that_applies_but_does_not_fit_is_an_error(
    rule: Any, weights: dict[str, Tensor], text: str
) -> None:
    model = nn.Linear(3, 4, bias=False, device="meta")
    with pytest.raises(di.PlanError, match=text):
        di.materialize(model, "cpu", weights=weights, names=[rule])
    assert model.weight.is_meta


def test_rules_say_what_is_wrong_with_their_arguments() -> None:
    with pytest.raises(ValueError, match=r"'\(' is no regular expression: missing"):
        Fuse("(", ["a"])
    with pytest.raises(ValueError, match="`dim` must be counted from the front, found"):
        Stack("a", "b", dim=-1)
    with pytest.raises(ValueError, match="`groups` must be 1 or more, found 0"):
        Split("a", ["b"], groups=0)


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

"""Projections that are joined or apart, experts that are stacked, matrices turned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.handlers import checkpoint
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.sources import Fuse, Split, Stack, Transpose, Unstack
from tests.behaviour.equal_models import on_meta
from tests.weights.small_models import assert_holds


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

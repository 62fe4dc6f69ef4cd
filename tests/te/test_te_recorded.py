"""Recorded constructors that tie, replace, drop and split what TE's modules own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from te_equality import assert_same_parameters
from torch import nn

import deferred_init as di

pytestmark = pytest.mark.te
Make = Callable[[Any, str], nn.Module]


def _modules(**named: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in named.items():
        model.add_module(name, module)
    return model


def _split(te: Any, device: str) -> nn.Module:
    return te.Linear(8, 24, parameters_split=("q", "k", "v"), device=device)


def _attention(te: Any, device: str) -> nn.Module:
    return te.MultiheadAttention(16, 2, attention_type="cross", device=device)


def _tied_op(te: Any, device: str) -> nn.Module:
    head = te.ops.Linear(8, 11, bias=False, device=device)
    model = _modules(table=nn.Embedding(11, 8), head=te.ops.Sequential(head))
    head.weight = model.table.weight
    return _modules(tied=model, last=nn.Linear(3, 3))


def _replaced_before_it_is_made(te: Any, device: str) -> nn.Module:
    model = _modules(layer=te.Linear(8, 11, device=device))
    model.layer.weight = nn.Parameter(torch.randn(11, 8))
    return _modules(replaced=model, last=nn.Linear(3, 3))


def _expert_tied_to_a_later_layer(te: Any, device: str) -> nn.Module:
    model = _modules(experts=te.GroupedLinear(2, 8, 8, device=device))
    model.layer = nn.Linear(8, 8)
    model.experts.weight1 = model.layer.weight
    return model


CASES: dict[str, Make] = {
    "split": _split,
    "attention": _attention,
    "tied op": _tied_op,
    "replaced": _replaced_before_it_is_made,
    "tied expert": _expert_tied_to_a_later_layer,
}


@pytest.mark.parametrize("kind", CASES)
def test_it_equals_eager_and_so_does_the_generator(te: Any, kind: str) -> None:
    model = di.deferred_init(CASES[kind], te, "cuda")
    report = di.materialize(model, "cpu", seed=0, verify="full")
    assert not report.assumptions
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = CASES[kind](te, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_parameters(model, twin)


@te_needs("ops.GroupedLinear")
def test_biases_that_are_joined_when_they_get_memory_are_joined_then(te: Any) -> None:
    def build(device: str) -> nn.Module:
        return te.GroupedLinear(3, 8, 8, single_grouped_bias=True, device=device)

    model = di.deferred_init(build, "cuda")
    di.materialize(model, "cpu", seed=0, verify="full")
    torch.manual_seed(0)
    for name, param in build("cpu").named_parameters():
        assert torch.equal(model.get_parameter(name), param), name


def _told(report: di.Report, *words: str) -> None:
    (text,) = report.assumptions
    assert all(word in text for word in words), text


def _mixed(te: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4),
        te.Linear(4, 4),
        te.RMSNorm(4),
        te.ops.BasicLinear(4, 4),
        nn.Linear(4, 4),
    )


def test_a_module_that_the_constructor_drops_again_is_told(te: Any) -> None:
    def build() -> nn.Module:
        te.Linear(8, 8)
        return nn.Linear(8, 8)

    report = di.materialize(di.deferred_init(build), "cpu", seed=0)
    _told(report, "`Linear`: of the modules", "does not make 1", "in one call")


def test_one_that_drew_nothing_and_one_that_was_the_last_are_not(te: Any) -> None:
    def build() -> nn.Module:
        te.RMSNorm(8)
        model = nn.Linear(8, 8)
        te.Linear(8, 8)
        return model

    assert not di.materialize(di.deferred_init(build), "cpu", seed=0).assumptions


def test_a_subclass_of_what_draws_nothing_may_draw(te: Any) -> None:
    class Own(te.RMSNorm):  # type: ignore[misc,name-defined]
        def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
            super().reset_parameters(*args, **kwargs)
            nn.init.normal_(self.weight)

    def build() -> nn.Module:
        Own(8)
        return nn.Linear(8, 8)

    report = di.materialize(di.deferred_init(build), "cpu", seed=0)
    _told(report, "`Own`: of the modules")


def test_a_part_after_modules_that_the_call_does_not_make_is_told(te: Any) -> None:
    model = di.deferred_init(_mixed, te)
    report = di.materialize([model[0], model[4]], "cpu", seed=0)
    _told(report, "`Linear`, `BasicLinear`: of the modules", "does not make 2")


def test_a_part_after_what_torch_drew_is_told(te: Any) -> None:
    model = di.deferred_init(_mixed, te)
    report = di.materialize(model[1], "cpu", seed=0)
    _told(report, "`Linear`: this call makes nothing else", "in one call")


def test_between_modules_left_to_themselves_too(te: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(te.Linear(4, 4), te.LayerNormMLP(4, 4))

    model = di.deferred_init(build)
    report = di.materialize(model[1], "cpu", seed=0)
    _told(report, "`Linear`: of the modules", "does not make 1")


@pytest.mark.parametrize("parts", [(0, 1), (0,), (2,)])
def test_parts_that_come_first_or_draw_nothing_are_eager_and_not_told(
    te: Any, parts: tuple[int, ...]
) -> None:
    model = di.deferred_init(_mixed, te)
    report = di.materialize([model[i] for i in parts], "cpu", seed=0)
    assert not report.assumptions


@pytest.mark.parametrize("policy", ["by_name", "fast"])
def test_numbers_that_do_not_go_by_the_order_are_not_told_of(
    te: Any, policy: str
) -> None:
    model = di.deferred_init(_mixed, te)
    part = nn.ModuleList([model[1], model[4]])
    report = di.materialize(part, "cpu", seed=0, rng=policy)
    assert not report.assumptions


def _copied(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer)


def _loaded(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(torch.ones(8, 8))  # type: ignore[operator,union-attr]
    return layer


def _cast_and_scaled(layer: nn.Module) -> nn.Module:
    layer.bfloat16()
    layer.weight.data = layer.weight.data * 2  # type: ignore[operator,union-attr]
    return layer


@pytest.mark.parametrize(
    ("change", "name"),
    [(_copied, "clone"), (_loaded, "copy_"), (_cast_and_scaled, "mul")],
)
def test_what_is_done_with_weights_that_have_no_values_yet_is_told(
    te: Any, change: Callable[[nn.Module], nn.Module], name: str
) -> None:
    def build() -> nn.Module:
        layer = te.Linear(8, 8)
        return nn.ModuleList([layer, change(layer)])

    report = di.materialize(di.deferred_init(build), "cpu", seed=0)
    _told(report, f"`{name}` at `{__file__}:", "do it after `materialize`")


def test_casts_views_and_init_methods_are_not_told_of(te: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = te.Linear(8, 8)
            self.apply(self._init_weights)
            self.bfloat16()
            assert self.layer.weight.detach().view(-1).numel() == 64

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, te.Linear):
                nn.init.normal_(module.weight, std=0.5)

    model = di.deferred_init(Model)
    assert not di.materialize(model, "cpu", seed=0).assumptions
    assert model.layer.weight.dtype is torch.bfloat16
    assert float(model.layer.weight.detach().std()) > 0.3

"""Two models recorded before either is made, and the numbers they begin with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di

SAME = "both begin with the same numbers"


def _linear() -> nn.Linear:
    return nn.Linear(4, 4)


def _said(report: di.Report) -> bool:
    return any(SAME in text for text in report.assumptions)


def test_the_second_of_two_recordings_is_said_to_begin_as_the_first() -> None:
    first, second = di.deferred_init(_linear), di.deferred_init(_linear)
    assert not _said(di.materialize(first, "cpu"))
    assert _said(di.materialize(second, "cpu"))
    assert torch.equal(first.weight, second.weight)


def test_it_is_said_of_each_of_several_in_one_call_and_in_the_plan() -> None:
    models = [di.deferred_init(_linear) for _ in range(3)]
    assert any(SAME in text for text in di.plan(models, "cpu").assumptions)
    assert _said(di.materialize(models, "cpu"))


@pytest.mark.parametrize("rng", ["by_name", "fast"])
def test_nothing_is_said_where_the_numbers_come_by_name(rng: str) -> None:
    di.deferred_init(_linear)
    assert not _said(di.materialize(di.deferred_init(_linear), "cpu", rng=rng, seed=0))


def test_a_seed_for_both_gives_what_eager_construction_gives() -> None:
    models = [di.deferred_init(_linear) for _ in range(2)]
    assert not _said(di.materialize(models, "cpu", seed=3))
    torch.manual_seed(3)
    for model in models:
        assert torch.equal(model.weight, _linear().weight)


def test_nothing_is_said_where_the_first_is_made_before_the_second_is_recorded() -> (
    None
):
    torch.manual_seed(3)
    for _ in range(2):
        assert not _said(di.materialize(di.deferred_init(_linear), "cpu"))
    torch.manual_seed(3)  # as before the first: on purpose, and made since
    assert not _said(di.materialize(di.deferred_init(_linear), "cpu"))


def test_nothing_is_said_after_a_recording_that_draws_nothing() -> None:
    torch.manual_seed(3)
    first, second = di.deferred_init(nn.LayerNorm, 4), di.deferred_init(_linear)
    assert not _said(di.materialize([first, second], "cpu"))
    torch.manual_seed(3)
    assert torch.equal(second.weight, _linear().weight)


def test_nothing_is_said_where_numbers_were_drawn_in_between() -> None:
    di.deferred_init(_linear)
    torch.rand(1)
    assert not _said(di.materialize(di.deferred_init(_linear), "cpu"))

"""States of generators that a constructor saves for later, outside of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.record import RecordError, deferred_init, materialize_module
from tests.trackers import Tracker, assert_alike


def build(tracker: Tracker) -> nn.Module:
    layers = []
    for name in ("model", "experts", "model"):
        with tracker.fork(name):
            layers.append(nn.Linear(4, 4))
        layers.append(nn.Linear(4, 2))
    return nn.Sequential(*layers)


def tracker() -> Tracker:
    return Tracker(model=7, experts=9, unused=11)


def ways() -> dict[str, Callable[[nn.Module], Any]]:
    def whole(model: nn.Module) -> None:
        torch.manual_seed(1)
        materialize_module(model)

    return {
        "materialize": lambda model: di.materialize(model, "cpu", seed=1),
        "materialize_module": whole,
    }


@pytest.mark.parametrize("way", ways().values(), ids=ways())
def test_states_of_a_tracker_end_where_eager_leaves_them(way):
    own, theirs = tracker(), tracker()
    torch.manual_seed(1)
    eager = build(theirs)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    model = deferred_init(build, own)
    way(model)
    assert torch.equal(after, torch.get_rng_state())
    assert_alike(eager, model, theirs, own)


def test_a_tracker_that_the_constructor_makes_is_right_too():
    def made() -> nn.Module:
        kept.append(tracker())
        return build(kept[-1])

    kept: list[Tracker] = []
    torch.manual_seed(1)
    eager = made()
    model = deferred_init(made)
    di.materialize(model, "cpu", seed=1)
    assert_alike(eager, model, *kept)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("together", [True, False], ids=["together", "in turns"])
def test_a_second_model_goes_on_where_the_first_left_the_tracker(together, seed):
    own, theirs = tracker(), tracker()
    torch.manual_seed(1)
    eager = nn.ModuleList([build(theirs), build(theirs)])
    torch.manual_seed(1)
    if together:
        both = [deferred_init(build, own) for _ in range(2)]
        di.materialize(both, "cpu", seed=1)
    else:
        both = [deferred_init(build, own)]
        di.materialize(both[0], "cpu", seed=seed)
        both.append(deferred_init(build, own))
        di.materialize(both[1], "cpu")
    assert_alike(eager, nn.ModuleList(both), theirs, own)


def test_the_second_of_two_may_be_made_first():
    own, theirs = tracker(), tracker()
    torch.manual_seed(1)
    eager = nn.ModuleList([build(theirs), build(theirs)])
    both = [deferred_init(build, own) for _ in range(2)]
    di.materialize(both[1], "cpu", seed=1)
    di.materialize(both[0], "cpu", seed=1)
    for at in (0, 2, 4):  # the others are drawn from the default generator
        for one in range(2):
            assert torch.equal(eager[one][at].weight, both[one][at].weight)
    for name, state in theirs.states.items():
        assert torch.equal(state, own.states[name])


@pytest.mark.parametrize("rng", ["by_name", "fast"])
def test_where_nothing_is_drawn_they_are_as_they_were(rng):
    own = tracker()
    before = dict(own.states)
    model = deferred_init(build, own)
    di.materialize(model, "cpu", seed=1, rng=rng)
    for name, state in before.items():
        assert torch.equal(state, own.states[name]), name


def test_where_everything_is_loaded_they_are_as_they_were():
    own = tracker()
    before = dict(own.states)
    values = {
        name: torch.ones_like(p) for name, p in build(tracker()).named_parameters()
    }
    model = deferred_init(build, own)
    di.materialize(model, "cpu", weights=values)
    for name, state in before.items():
        assert torch.equal(state, own.states[name]), name


def test_a_failed_constructor_leaves_them_as_they_were():
    def broken(own: Tracker) -> nn.Module:
        build(own)
        raise KeyError("inside")

    own = tracker()
    before = dict(own.states)
    with pytest.raises(KeyError, match="inside"):
        deferred_init(broken, own)
    for name, state in before.items():
        assert torch.equal(state, own.states[name]), name


def test_after_a_failure_materialize_can_be_called_again(monkeypatch):
    own, theirs = tracker(), tracker()
    torch.manual_seed(1)
    eager = build(theirs)
    model = deferred_init(build, own)
    held = dict(own.states)
    saved = {name: state.clone() for name, state in held.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("deferred_init.pipeline.rebind_holders", None)
    with pytest.raises(di.MaterializeError, match="NoneType"):
        di.materialize(model, "cpu", seed=1, optimizers=[optimizer])
    monkeypatch.undo()
    for name, state in saved.items():
        assert own.states[name] is held[name]
        assert torch.equal(state, held[name])
    di.materialize(model, "cpu", seed=1, optimizers=[optimizer])
    assert_alike(eager, model, theirs, own)


def test_a_state_that_a_module_keeps_beside_a_tracker_is_right():
    def keeping(own: Tracker) -> nn.Module:
        model = build(own)
        model.state = own.states["model"]
        return model

    own, theirs = tracker(), tracker()
    torch.manual_seed(1)
    eager = keeping(theirs)
    model = deferred_init(keeping, own)
    di.materialize(model, "cpu", seed=1)
    assert_alike(eager, model, theirs, own)
    assert torch.equal(eager.state, model.state)


def test_a_state_of_a_model_that_is_gone_is_refused():
    own = tracker()
    deferred_init(build, own)
    gc.collect()
    with pytest.raises(RecordError, match="has the state of another one"):
        deferred_init(build, own)

"""Constructors whose own layers and Transformer Engine's draw from one tracker.

As Megatron-LM's do: its embedding and its output layer are modules of its own, and
draw while they are constructed; the layers between are Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.trackers import Tracker, assert_alike

pytest.importorskip("transformer_engine.pytorch", reason="needs TE")


def te_layers(te: Any, tracker: Tracker, device: str | None) -> list[nn.Module]:
    kwargs: dict[str, Any] = {"device": device} if device else {}
    tracked = {"get_rng_state_tracker": lambda: tracker, **kwargs}
    return [
        te.Linear(8, 8, **tracked),
        te.LayerNormLinear(8, 8, **tracked),
        te.LayerNormMLP(8, 16, **tracked),
        te.Linear(8, 8, rng_tracker_name="experts", **tracked),
        te.Linear(8, 8, **kwargs),
        te.ops.BasicLinear(8, 8, rng_state_tracker_function=lambda: tracker, **kwargs),
    ]


def embedding_and_head(te: Any, tracker: Tracker, device: str | None) -> nn.Module:
    with tracker.fork():
        embedding = nn.Embedding(4, 8)
    layers = te_layers(te, tracker, device)
    with tracker.fork():
        head = nn.Linear(8, 4)
    return nn.Sequential(embedding, *layers, head)


def embedding_alone(te: Any, tracker: Tracker, device: str | None) -> nn.Module:
    with tracker.fork():
        embedding = nn.Embedding(4, 8)
    return nn.Sequential(embedding, *te_layers(te, tracker, device))


def head_alone(te: Any, tracker: Tracker, device: str | None) -> nn.Module:
    layers = te_layers(te, tracker, device)
    with tracker.fork("experts"):
        return nn.Sequential(*layers, nn.Linear(8, 4))


def inside_of_a_fork(te: Any, tracker: Tracker, device: str | None) -> nn.Module:
    kwargs: dict[str, Any] = {"device": device} if device else {}
    with tracker.fork("experts"):
        first = nn.Linear(8, 8)
        own = te.Linear(8, 8, **kwargs)
        second = nn.Linear(8, 8)
    with tracker.fork("experts"):
        third = te.Linear(8, 8, **kwargs)
    return nn.Sequential(first, own, second, third, nn.Linear(8, 8))


def in_turns(te: Any, tracker: Tracker, device: str | None) -> nn.Module:
    blocks = []
    for name in ("model-parallel-rng", "experts", "model-parallel-rng"):
        with tracker.fork(name):
            blocks.append(nn.Linear(8, 8))
        blocks += te_layers(te, tracker, device)
    return nn.Sequential(*blocks)


BUILDS = (embedding_and_head, embedding_alone, head_alone, inside_of_a_fork, in_turns)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_recorded_model_draws_in_turns_with_transformer_engine(
    te: Any, build: Callable[..., nn.Module]
) -> None:
    theirs, own = Tracker(), Tracker()
    torch.manual_seed(3)
    eager = build(te, theirs, "cpu")
    after = torch.get_rng_state()
    model = di.deferred_init(build, te, own, None)
    di.materialize(model, "cpu", seed=3)
    assert torch.equal(torch.get_rng_state(), after)
    assert_alike(eager, model, theirs, own)


def test_a_second_model_goes_on_with_the_tracker(te: Any) -> None:
    theirs, own = Tracker(), Tracker()
    torch.manual_seed(3)
    eager = nn.ModuleList([in_turns(te, theirs, "cpu") for _ in range(2)])
    models = [di.deferred_init(in_turns, te, own, None) for _ in range(2)]
    di.materialize(models, "cpu", seed=3)
    assert_alike(eager, nn.ModuleList(models), theirs, own)


def test_a_failure_puts_the_tracker_back(te: Any) -> None:
    theirs, own = Tracker(), Tracker()
    torch.manual_seed(3)
    eager = in_turns(te, theirs, "cpu")
    model = di.deferred_init(in_turns, te, own, None)
    before = {name: state.clone() for name, state in own.states.items()}
    last = model[-1]
    last._rng_state_tracker_function = lambda: {}["no such tracker"]
    with pytest.raises(di.MaterializeError, match="no such tracker"):
        di.materialize(model, "cpu", seed=3)
    for name, state in before.items():
        assert torch.equal(state, own.states[name]), name
    last._rng_state_tracker_function = lambda: own
    di.materialize(model, "cpu", seed=3)
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rng", ["eager", "by_name"])
def test_a_model_of_transformer_engine_alone_draws_from_the_tracker(
    te: Any, rng: str
) -> None:
    theirs, own = Tracker(), Tracker()
    torch.manual_seed(3)
    eager = nn.Sequential(*te_layers(te, theirs, "cpu"))
    model = di.deferred_init(lambda: nn.Sequential(*te_layers(te, own, None)))
    again = di.deferred_init(lambda: nn.Sequential(*te_layers(te, own, None)))
    before = {name: state.clone() for name, state in own.states.items()}
    di.plan(model, "cpu")
    assert all(torch.equal(own.states[name], state) for name, state in before.items())
    di.materialize(model, "cpu", seed=3, rng=rng)
    if rng == "eager":
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
        for name, state in theirs.states.items():
            assert torch.equal(state, own.states[name]), name
    di.materialize(again, "cpu", seed=3, rng=rng)

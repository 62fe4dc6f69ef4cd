"""A signal at every step boundary: SIGINT in the process, SIGKILL in a child."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.handlers.protocol import Step
from deferred_init.rng import Eager
from tests.reliability.kills import kill_at_boundaries
from tests.reliability.portrait import assert_equal, generators, portrait


def build() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.append(nn.Linear(2, 3, bias=False))
    model[3].weight = model[0].weight
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return build()


def recorded() -> nn.Module:
    return di.deferred_init(build)


def signal_after_step(number: int, what: int) -> Any:
    """Return a stand-in for `Eager.step` that sends a signal between two steps."""

    @contextmanager
    def step_then_signal(self: Eager, step: Step) -> Iterator[None]:
        yield
        if step.index == number:
            os.kill(os.getpid(), what)

    return step_then_signal


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_ctrl_c_at_any_step_boundary_puts_everything_back(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(1)
    report = di.materialize(reference, "cpu")
    expected = portrait(reference)
    assert len(report.steps) >= 3
    for number in range(len(report.steps)):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        held = [id(p) for p in optimizer.param_groups[0]["params"]]
        torch.manual_seed(1)
        before, states = portrait(model), generators()
        with monkeypatch.context() as patched:
            stand_in = signal_after_step(number, signal.SIGINT)
            patched.setattr(Eager, "step", stand_in)
            with pytest.raises(KeyboardInterrupt):
                di.materialize(model, "cpu", optimizers=optimizer)
        assert_equal(portrait(model), before)
        assert generators() == states
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == held
        assert not optimizer.state
        assert di.materialize(model, "cpu", optimizers=optimizer).ok
        assert_equal(portrait(model), expected)


@pytest.mark.parametrize("kind", ["", "weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("made", ["on_meta", "recorded"])
def test_a_kill_at_any_boundary_leaves_files_alone_and_nothing_behind(
    made: str, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = build()
    path = tmp_path / kind
    if kind:
        state = dict(source.state_dict())
        del state["1.weight"]  # so that there is an initialization before the loading
        del state["3.weight"]  # tied
        save = torch.save
        if kind.endswith("safetensors"):
            save = pytest.importorskip("safetensors.torch").save_file
        save(state, path)
    kills = kill_at_boundaries(
        f"tests.reliability.test_kills:{made}", path if kind else None, tmp_path
    )
    assert kills > 8
    if kind:
        model = recorded()
        assert di.materialize(model, "cpu", weights=str(path)).ok
        assert torch.equal(model[0].weight, source[0].weight)

"""A signal at every step boundary: SIGINT in the process, SIGKILL in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
from tests.reliability.portrait import assert_equal, generators, portrait
from tests.reliability.tally import tally

ROOT = Path(__file__).resolve().parents[2]


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


_VICTIM = """
import os, signal, sys
import deferred_init as di
from tests.reliability.faults import EVERY, Boundaries
from tests.reliability.test_kills import on_meta, recorded

make = {"meta": on_meta, "recorded": recorded}[sys.argv[1]]
weights = sys.argv[2] or None
with Boundaries() as counted:
    di.materialize(make(), "cpu", weights=weights)
places = range(1, len(counted.crossed) + 1, EVERY)
for at in places:
    victim = os.fork()
    if victim == 0:
        with Boundaries(at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            di.materialize(make(), "cpu", weights=weights)
        os._exit(0)
    _, status = os.waitpid(victim, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, at
print(len(places))
"""


@pytest.mark.parametrize("kind", ["", "weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("made", ["meta", "recorded"])
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
    content = path.read_bytes() if kind else b""
    shared = set(Path("/dev/shm").iterdir())
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _VICTIM, made, str(path) if kind else ""],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 8
    tally["kills"] += int(done.stdout)
    assert list(scratch.iterdir()) == []
    assert {p for p in set(Path("/dev/shm").iterdir()) - shared if _ours(p)} == set()
    if kind:
        assert path.read_bytes() == content
        model = recorded()
        assert di.materialize(model, "cpu", weights=str(path)).ok
        assert torch.equal(model[0].weight, source[0].weight)


def _ours(path: Path) -> bool:
    """Whether an entry of shared memory may come from torch in the child."""
    return path.name.startswith(("torch_", "psm_"))

"""A fault at any boundary of the pipeline leaves everything as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import deferred_init as di
from deferred_init.record import materialize as record_materialize
from deferred_init.record.execution import Executor
from tests.reliability.faults import (
    ERRORS,
    Job,
    check_every_boundary,
    held_by,
    own_threads,
    raising,
)
from tests.reliability.portrait import assert_equal, generators, portrait, seed


class Slotted(nn.Parameter):
    """Cannot be exchanged with a plain Parameter, so that it has to be replaced."""

    __slots__ = ("note",)


class Replaces(nn.Module):
    """Its own init puts a parameter of another layout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        made = torch.ones(2, device=self.weight.device)
        self.weight = self.weight if made.is_meta else Slotted(made)
        with torch.no_grad():
            self.weight.uniform_()


def build() -> nn.Module:
    """Ties, views, frozen and marked parameters, a parametrization, a shared module."""
    model = nn.Sequential(
        nn.Embedding(5, 4, padding_idx=0),
        nn.ModuleDict({"lin": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}),
        nn.GRU(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Linear(4, 5, bias=False),
    )
    model[4].weight = model[0].weight
    model.append(model[1])
    model[2].requires_grad_(False).eval()
    model[0].weight.tensor_model_parallel = True
    model[0].weight.register_hook(lambda grad: grad)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return build()


def recorded() -> nn.Module:
    return di.deferred_init(build)


def plain_job(make: Callable[[], nn.Module], **options: Any) -> Job:
    seed(3)
    model = make()
    adagrad = torch.optim.Adagrad(model[0].parameters(), initial_accumulator_value=0.1)
    optimizers = [torch.optim.AdamW(model[1].parameters()), adagrad]
    holders: list[Any] = [dict(model[1].named_parameters())]
    if make is on_meta:
        holders.append(AveragedModel(nn.Linear(2, 2)))  # real, and stays as it is

    def run() -> None:
        di.materialize(model, "cpu", optimizers=optimizers, holders=holders, **options)

    return Job(run=run, held=lambda: [model, held_by(optimizers), holders])


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "full"},
        {"dtype": torch.bfloat16, "seed": 1},
        {"rng": "by_name", "seed": 1},
        {"rng": "fast", "seed": 1},
    ],
    ids=["full", "cast", "by_name", "fast"],
)
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_a_fault_at_any_boundary_is_undone(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    crossed = check_every_boundary(lambda: plain_job(make, **options))
    assert len(crossed) > 40
    assert {"before run_audit", "after run_audit"} <= set(crossed)


@pytest.mark.parametrize("error", ERRORS.values())
def test_what_a_fault_left_of_a_module_the_next_call_completes(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`materialize_module` changes all tensors at the end, one after the other."""
    seed(3)
    expected, states = portrait(build()), generators()
    seed(3)
    model = recorded()
    before = portrait(model)
    calls, become = 0, record_materialize.become

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        become(*args)
        if calls in (1, 4, 9):
            raise error("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "call", lambda *_: raising(error("on purpose"))())
        with pytest.raises((error, di.DeferredInitError)):
            di.materialize_module(model)
    assert_equal(portrait(model), before)
    monkeypatch.setattr(record_materialize, "become", failing)
    for _ in range(3):
        with pytest.raises(error):
            di.materialize_module(model)
    di.materialize_module(model)
    assert_equal(portrait(model), expected)
    assert generators() == states


def test_a_parameter_that_had_to_be_replaced_is_the_old_one_again() -> None:
    def make() -> Job:
        seed(3)
        with torch.device("meta"):
            model = Replaces()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"mine": torch.ones(2)}
        held = {"weight": model.weight}

        def run() -> None:
            di.materialize(model, "cpu", optimizers=optimizer, holders=[held])

        return Job(run=run, held=lambda: [model, held_by([optimizer]), held])

    check_every_boundary(make, every=1)
    job = make()
    before = job.objects()
    job.run()
    assert job.objects() != before


@pytest.mark.parametrize("kind", ["safetensors", "torch", "mapping"])
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_a_fault_while_loading_stops_the_readers_and_leaves_files_alone(
    make: Callable[[], nn.Module],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deferred_init.handlers.checkpoint._STEP_BYTES", 100)
    seed(7)
    state = {k: v.clone() for k, v in build().state_dict().items() if k != "4.weight"}
    del state["1.lin.weight"]  # is initialized, before the loading
    state = {k: v for k, v in state.items() if not k.startswith("5.")}
    weights = saved(state, kind, tmp_path)

    def job() -> Job:
        made = plain_job(make, weights=weights)
        made.more = lambda: (own_threads(), digests(tmp_path))
        return made

    crossed = check_every_boundary(job)
    assert crossed.count("after a step") > 5


def saved(state: dict[str, Tensor], kind: str, folder: Path) -> Any:
    path = folder / ("weights.pt" if kind == "torch" else "weights.safetensors")
    if kind == "safetensors":
        files = pytest.importorskip("safetensors.torch", reason="needs safetensors")
        files.save_file(state, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        return state
    return path


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }

"""Ranks that are not in the same call, or that fail where nobody meets."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE
from models import Net, compare
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.rendezvous import Meeting, RanksFailed, RanksMissing

Ranks = Callable[[int], RankPool]
_SOON_S = 10.0


def _sharded(make: Callable[[], nn.Module] = Net) -> Any:
    warnings.simplefilter("ignore")
    model: Any = di.deferred_init(make)
    fully_shard(model)
    return model


def _made_afterwards(rank: int) -> None:
    """Check that the ranks are in step again: the next call is right."""
    torch.manual_seed(3)
    expected = Net()
    model = _sharded()
    di.materialize(model, DEVICE, seed=3, rank_timeout_s=_SOON_S)
    compare(model, expected)


def _plan_on_one(rank: int) -> tuple[str, float]:
    model = _sharded()
    begun = time.monotonic()
    call: Any = di.plan if rank == 0 else di.materialize
    with pytest.raises(di.PlanError) as caught:
        call(model, DEVICE, seed=1)
    seconds = time.monotonic() - begun
    assert all(parameter.is_meta for parameter in model.parameters())
    _made_afterwards(rank)
    return str(caught.value), seconds


def test_a_plan_on_one_rank_alone_is_refused_on_all(ranks: Ranks) -> None:
    for text, seconds in ranks(3).run(_plan_on_one):
        assert (
            "the ranks make different calls: `plan` on rank 0, `materialize` on ranks "
            "1-2. Every rank that holds a part of the model has to make the same calls"
        ) in text
        assert seconds < _SOON_S


def _audit_on_one(rank: int) -> list[tuple[str, str]]:
    model, other = _sharded(), _sharded()
    di.materialize(model, DEVICE, seed=1)
    if rank == 0:
        report = di.audit(model, verify="full")
        found = [(finding.code, finding.message) for finding in report.findings]
    else:
        with pytest.raises(di.PlanError) as caught:
            di.materialize(other, DEVICE, seed=1)
        found = [("refused", str(caught.value))]
    _made_afterwards(rank)
    return found


def test_a_full_audit_beside_another_call_is_told_apart(ranks: Ranks) -> None:
    first, second = ranks(2).run(_audit_on_one)
    assert first[0][0] == "ranks-missing"
    assert second[0][0] == "refused"
    for text in (first[0][1], second[0][1]):
        assert (
            'the audit with `verify="full"` on rank 0, `materialize` on rank 1' in text
        )


def _argument(rank: int, case: str, folder: Path) -> tuple[str, float]:
    model = _sharded()
    wrong = rank == 1
    options: dict[str, Any] = {
        "recipe": {"recipe": "bf17"},
        "dtype": {"dtype": torch.int8},
        "device": {"device": "cuda:77"},
        "weights": {"weights": folder / "absent.safetensors"},
        "names": {"names": {"a": "b"}},
        "optimizers": {"optimizers": [object()]},
    }[case]
    options = {"device": DEVICE, **(options if wrong else {})}
    begun = time.monotonic()
    with pytest.raises((di.PlanError, TypeError, ValueError)) as caught:
        di.materialize(model, seed=1, rank_timeout_s=60.0, **options)
    seconds = time.monotonic() - begun
    assert all(parameter.is_meta for parameter in model.parameters())
    _made_afterwards(rank)
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("recipe", "no recipe is called `bf17`"),
        ("dtype", "dtype must be a floating-point torch.dtype"),
        ("device", "device 'cuda:77' was asked for"),
        ("weights", "absent.safetensors: no such file or folder"),
        ("names", "`names` says how weights are named"),
        ("optimizers", "expected torch optimizers in `optimizers`"),
    ],
)
def test_an_argument_that_one_rank_cannot_use_stops_all(
    ranks: Ranks, case: str, said: str, tmp_path: Path
) -> None:
    answers = ranks(3).run(_argument, case, tmp_path)
    for text, seconds in answers:
        assert said in text
        assert seconds < _SOON_S
    assert "it failed on rank 1: " in answers[0][0]
    assert answers[0][0] == answers[2][0]


class Spoilt(nn.Module):
    """The last row is not a number, and lies on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        with torch.no_grad():
            self.weight[3] = float("nan")


def _found_on_one(rank: int) -> str:
    model = _sharded(Spoilt)
    with pytest.raises(di.AuditError) as caught:
        di.materialize(model, DEVICE, seed=1, verify="full")
    report = caught.value.report
    assert report is not None
    assert [finding.code for finding in report.findings] == [
        "not-finite" if rank == 1 else "other-ranks"
    ]
    return report.findings[0].message


def test_what_the_audit_of_one_rank_finds_is_raised_on_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(_found_on_one)
    assert "found on rank 1: `weight` [not-finite] " in first
    assert second.startswith("expected finite values, found 3 NaN of 6")


class Halved(nn.Module):
    """Its init reads what its child made before, for which the shards are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.first.weight.mul_(0.5)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def _fails_before_a_gather(rank: int) -> tuple[str, float]:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Halved()
    fully_shard(model)
    reset = nn.Linear.reset_parameters

    def fail(self: nn.Linear) -> None:
        reset(self)
        if not self.weight.is_meta and self is model.second:
            raise OSError("the disk is on fire")

    begun = time.monotonic()
    if rank == 1:
        nn.Linear.reset_parameters = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(di.MaterializeError) as caught:
            di.materialize(model, DEVICE, seed=1, rank_timeout_s=60.0)
    finally:
        nn.Linear.reset_parameters = reset  # type: ignore[method-assign]
    seconds = time.monotonic() - begun
    assert all(parameter.is_meta for parameter in model.parameters())
    _made_afterwards(rank)
    return str(caught.value), seconds


def test_nobody_waits_in_a_gather_for_a_rank_that_failed(ranks: Ranks) -> None:
    for text, seconds in ranks(2).run(_fails_before_a_gather):
        assert "the disk is on fire" in text
        assert seconds < _SOON_S


def _meet(rank: int, call: str, timeout_s: float) -> str:
    try:
        meeting = Meeting((0, 1), timeout_s, call)
        return meeting.decide(rank, lambda answers: str(sum(answers.values())))
    except (RanksMissing, RanksFailed) as error:
        return str(error)


def _late(rank: int) -> list[str]:
    """Let rank 1 come to a meeting that is over, then all to the next one."""
    said = [_meet(rank, "call 0", 0.5)] if rank == 0 else []
    dist.barrier()
    return [*said, _meet(rank, "call 1", 30.0), _meet(rank, "call 2", 30.0)]


def test_a_rank_that_comes_late_is_told_and_is_in_step_afterwards() -> None:
    pool = RankPool(2)
    first, second = pool.run(_late)
    pool.end()
    assert first[0].startswith("rank 1 of 0-1 did not come within 0.5 s")
    assert first[1] == "it failed on rank 1: it came to call 1 too late for the others"
    assert second[0].startswith("rank 1 of 0-1 did not come within 0.5 s")
    assert second[0].endswith("This rank came too late")
    assert first[2] == second[1] == "1"


def _gives_up(rank: int) -> list[str]:
    """Let the first rank come when the other one has given up."""
    said = [_meet(rank, "call 0", 0.1)] if rank == 1 else []
    dist.barrier()
    if rank == 0:
        said = [_meet(rank, "call 0", 30.0)]
    return [*said, _meet(rank, "call 1", 30.0)]


def test_the_first_rank_hears_who_has_given_up_waiting_for_it() -> None:
    pool = RankPool(2)
    first, second = pool.run(_gives_up)
    pool.end()
    assert first == ["it failed on rank 1: it waited 5.1 s for rank 0", "1"]
    assert second[0].startswith("rank 0 did not come within 5.1 s")
    assert second[1] == "1"


def _cannot_judge(rank: int) -> str:
    def judge(_answers: object) -> None:
        raise KeyError("no")

    with pytest.raises(RanksFailed) as caught:
        Meeting((0, 1), 30.0, "a test").decide(rank, judge)
    return str(caught.value)


def test_an_error_in_the_judgement_is_told_to_all(ranks: Ranks) -> None:
    texts = ranks(2).run(_cannot_judge)
    assert texts == ["comparing them failed: KeyError: 'no'"] * 2


class TwoWide(nn.Module):
    """Two rows over three ranks leave the last one without any part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.first(x) + self.second(x)


def _without_a_part(rank: int, rng: str) -> None:
    expected = di.deferred_init(TwoWide)
    di.materialize(expected, DEVICE, seed=1, rng=rng)
    model = _sharded(TwoWide)
    di.materialize(model, DEVICE, seed=1, rng=rng)
    compare(model, expected)


@pytest.mark.parametrize("rng", ["by_name", "fast", "eager"])
def test_a_rank_may_keep_no_part_of_a_recorded_model(ranks: Ranks, rng: str) -> None:
    ranks(3).run(_without_a_part, rng)

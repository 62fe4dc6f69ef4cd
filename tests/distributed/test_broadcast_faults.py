"""A fault in the middle of a hand-over: nobody is left waiting in a collective."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from backend import DEVICE
from rank_pool import RankPool
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deferred_init as di
from deferred_init import pipeline
from deferred_init.distributed import broadcast
from tests.reliability.faults import ERRORS
from tests.reliability.portrait import assert_equal, generators, portrait, seed

Ranks = Callable[[int], RankPool]
# A rank that fails is heard at once; only one that stays away is waited for.
SOON_S, TIMEOUT_S = 30.0, 60.0
SMALL_BYTES = 64


class _Faulty(TorchDispatchMode):
    """Counts operations of torch and raises at one of them.

    Collectives are left out: one that fails by itself has broken the process group.
    """

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at, self._error = at, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "c10d":
            self.count += 1
            if self.count == self._at and self._error is not None:
                raise self._error
        return func(*args, **(kwargs or {}))


@contextmanager
def _in_the_hand_over(inside: Any) -> Iterator[None]:
    """Enter a context manager round `hand_over` alone."""
    real = pipeline.hand_over

    def hand_over(*args: Any) -> None:
        with inside:
            real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "hand_over", hand_over)
        patch.setattr(broadcast, "_PARCEL_BYTES", SMALL_BYTES)
        yield


def _made(rank: int) -> nn.Module:
    warnings.simplefilter("ignore")
    seed(3)
    with torch.device(DEVICE if rank == 0 else "meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    return model.append(nn.Linear(5, 2, device="meta"))


def _materialize(model: nn.Module) -> di.Report:
    return di.materialize(
        model, DEVICE, broadcast_from=0, seed=1, rank_timeout_s=TIMEOUT_S
    )


def _done(rank: int, inside: Any = None) -> dict[str, Any]:
    model = _made(rank)
    with _in_the_hand_over(nullcontext() if inside is None else inside):
        _materialize(model)
    return {**portrait(model), "(generators)": generators()}


def _hears(model: nn.Module, inside: Any, fails: type[BaseException] | None) -> None:
    """Let a hand-over fail; nothing is changed, and all know why, at once."""
    before = {**portrait(model), "(generators)": generators()}
    expected: Any = di.MaterializeError
    if fails is not None and not issubclass(fails, Exception):
        expected = fails
    begun = time.monotonic()
    with _in_the_hand_over(inside), pytest.raises(expected) as caught:
        _materialize(model)
    assert time.monotonic() - begun < SOON_S
    assert "on purpose" in str(caught.value)
    assert_equal({**portrait(model), "(generators)": generators()}, before)


def _fails_at_every_operation(rank: int, failing: int) -> int:
    counted = _Faulty()
    done = _done(rank, counted)
    cases = torch.tensor(counted.count if rank == failing else 0)
    torch.distributed.broadcast(cases, src=failing)
    for at in range(1, int(cases) + 1):
        error = list(ERRORS.values())[at % len(ERRORS)]
        model = _made(rank)
        if rank == failing:
            _hears(model, _Faulty(at, error("on purpose")), error)
        else:
            _hears(model, nullcontext(), None)
        _materialize(model)
        assert_equal({**portrait(model), "(generators)": generators()}, done)
    return int(cases)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_may_fail_at_any_operation_of_a_hand_over(
    ranks: Ranks, failing: int
) -> None:
    counts = ranks(3).run(_fails_at_every_operation, failing)
    assert len(set(counts)) == 1
    assert counts[0] > 20  # several parcels, each of several tensors


class _Interrupted:
    """The work of a collective; an interrupt comes when it is waited for."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._waited = False

    def wait(self) -> None:
        if not self._waited:
            self._waited = True
            raise KeyboardInterrupt("on purpose")
        self._work.wait()


@contextmanager
def _interrupt(when: str) -> Iterator[None]:
    """Interrupt the second collective: before it is begun, or when it is waited for."""
    real = broadcast.dist.broadcast
    count = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and when == "before":
            raise KeyboardInterrupt("on purpose")
        work = real(*args, **kwargs)
        return _Interrupted(work) if count == 2 else work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast.dist, "broadcast", interrupted)
        yield


def _interrupted_rank(rank: int, failing: int, when: str) -> None:
    done = _done(rank)
    model = _made(rank)
    if rank == failing:
        _hears(model, _interrupt(when), KeyboardInterrupt)
    else:
        _hears(model, nullcontext(), None)
    _materialize(model)
    assert_equal({**portrait(model), "(generators)": generators()}, done)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_an_interrupted_rank_ends_the_collective_that_the_others_are_in(
    ranks: Ranks, failing: int, when: str
) -> None:
    ranks(2).run(_interrupted_rank, failing, when)


def _large_and_small(rank: int) -> None:
    seed(5)
    expected = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 40), nn.Linear(40, 2))
    expected.double()[1].bfloat16()
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 40), nn.Linear(40, 2))
    model.double()[1].bfloat16()
    model.load_state_dict(expected.state_dict())
    if rank:
        model.to("meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "_PARCEL_BYTES", 200)  # some alone, some together
        di.materialize(model, DEVICE, broadcast_from=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name].to(DEVICE)), name
        assert value.dtype == expected.state_dict()[name].dtype


def test_tensors_of_several_sizes_and_dtypes_travel_together(ranks: Ranks) -> None:
    ranks(2).run(_large_and_small)

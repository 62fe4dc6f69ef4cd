"""A rank that is killed: the others name it, put everything back, and go on alone."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backend import DEVICE
from models import Net, shard
from rank_pool import RankPool
from torch import nn

import deferred_init as di
from deferred_init.distributed import broadcast
from tests.reliability.faults import Boundaries
from tests.reliability.portrait import assert_equal, generators, portrait, seed
from tests.reliability.tally import tally

TIMEOUT_S, SOON_S = 4.0, 40.0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _dies_at(place: str) -> Iterator[None]:
    """Die when a place is reached for the second time, or in the second collective."""
    real, count = broadcast._send, 0

    def send(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            _die()
        real(*args)

    with pytest.MonkeyPatch.context() as patch, Boundaries() as boundaries:
        cross = boundaries.cross

        def crossed(name: str) -> None:
            cross(name)
            if boundaries.crossed.count(place) == 2:
                _die()

        patch.setattr(boundaries, "cross", crossed)
        if place == "a collective":
            patch.setattr(broadcast, "_send", send)
        yield


def _sharded() -> tuple[nn.Module, dict[str, Any]]:
    seed(3)
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    return model, {"seed": 1}


def _half_real(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    seed(3)
    with torch.device("meta" if rank else DEVICE):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return model.append(nn.Linear(2, 2, device="meta")), {"broadcast_from": 0}


def _one_dies(rank: int, job: str, place: str) -> None:
    warnings.simplefilter("ignore")
    model, options = _sharded() if job == "sharded" else _half_real(rank)
    before = {**portrait(model), "(generators)": generators()}
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "_PARCEL_BYTES", 32)
        if rank:
            with _dies_at(place):
                di.materialize(model, DEVICE, rank_timeout_s=TIMEOUT_S, **options)
            return  # which the test takes for a failure
        with pytest.raises(di.MaterializeError) as caught:
            di.materialize(model, DEVICE, rank_timeout_s=TIMEOUT_S, **options)
    assert time.monotonic() - begun < SOON_S
    assert place == "a collective" or "rank 1 of 0-1 did not come" in str(caught.value)
    assert_equal({**portrait(model), "(generators)": generators()}, before)


@pytest.mark.parametrize(
    ("job", "place"),
    [
        ("sharded", "before a step"),
        ("sharded", "after exchange"),
        ("broadcast", "after allocate"),
        ("broadcast", "a collective"),
    ],
)
def test_the_others_roll_back_when_a_rank_is_killed(job: str, place: str) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(_one_dies, job, place)
    finally:
        pool.end()
    assert str(caught.value) == "rank 1: the process has ended"
    tally["kills"] += 1

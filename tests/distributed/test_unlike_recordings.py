"""Constructors that did other things on other ranks are told apart before anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.rendezvous import Meeting, RanksMissing

Ranks = Callable[[int], RankPool]


def _scaled(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    nn.init.normal_(model.weight, std=0.2 if odd else 0.1)
    return model


def _filled(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    nn.init.constant_(model.bias, float(odd))
    return model


def _read(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    given = torch.tensor([2.0 + odd])
    with torch.no_grad():
        model.weight.mul_(given)
    return model


def _behind_another_draw(odd: bool) -> Any:
    torch.rand(3 if odd else 2)
    return nn.Linear(4, 6)


def _seeded(odd: bool) -> Any:
    torch.manual_seed(odd)
    return nn.Linear(4, 6)


def _own_generator(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    generator = torch.Generator(DEVICE).manual_seed(int(odd))
    nn.init.normal_(model.weight, generator=generator)
    return model


def _computed(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    angles = torch.full((6,), 1.5 if odd else 0.5).sin()
    with torch.no_grad():
        model.bias.copy_(angles)
    return model


def _on_another_rank(odd: bool) -> Any:
    model = nn.Linear(4, 6)
    model.register_buffer("place", torch.full((1,), float(odd)))
    model.odd = odd
    return model


def _told(rank: int, make: Callable[[bool], Any]) -> tuple[str, float]:
    torch.manual_seed(0)
    model = di.deferred_init(make, rank == 2)
    fully_shard(model)
    started = time.perf_counter()
    try:
        di.materialize(model, DEVICE, seed=1)
    except di.PlanError as error:
        assert all(p.is_meta for p in model.parameters())
        return str(error), time.perf_counter() - started
    return "", 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_scaled, ["normal_(0.0, 0.1) from number 30 on ranks 0-1, normal_("]),
        (_filled, ["`bias`: fill_(0.0) on ranks 0-1, fill_(1.0) on rank 2"]),
        (_read, ["`weight`: _copy_of(", "[1] torch.float32 "]),
        (_behind_another_draw, ["`weight`: ", " from number 2 on ranks 0-1, "]),
        (_seeded, ["`weight`: ", " from seeded ", " number 0 on ranks 0-1, "]),
        (
            _own_generator,
            ["`weight`: normal_(0.0, 1.0, ", " from a generator in state "],
        ),
        (_computed, ["`bias`: ", "0.5", "1.5"]),
    ],
)
def test_ranks_whose_constructors_made_other_values_are_refused(
    ranks: Ranks, make: Callable[[bool], Any], said: list[str]
) -> None:
    answers = ranks(3).run(_told, make)
    assert len({text for text, _ in answers}) == 1
    for text, seconds in answers:
        assert text.startswith("the ranks disagree; nothing was changed:")
        assert all(each in text for each in said), text
        assert seconds < 10


def test_a_buffer_that_is_not_sharded_may_say_which_rank_it_is_on(ranks: Ranks) -> None:
    assert ranks(3).run(_told, _on_another_rank) == [("", 0.0)] * 3


def _stays_away(rank: int, path: str) -> str:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    text = ""
    if rank == 0:
        with pytest.raises(RanksMissing) as caught:
            Meeting((0, 1), 0.2, "a test").decide("here", lambda answers: None)
        text = str(caught.value)
    return text


def test_who_does_not_come_is_named_where_ranks_meet_in_a_file(tmp_path: Path) -> None:
    pool = RankPool(2)
    texts = pool.run(_stays_away, str(tmp_path / "store"))
    pool.end()
    assert texts[0].startswith("rank 1 of 0-1 did not come within 0.2 s")

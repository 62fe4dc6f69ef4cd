"""Ranks that disagree are refused on all of them, at once, and fail together."""

from __future__ import annotations

import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE, generator_states
from models import Net, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.rendezvous import Meeting, RanksMissing, spell_ranks

Ranks = Callable[[int], RankPool]


def _refused(rank: int, case: str, world: int) -> tuple[str, float]:
    warnings.simplefilter("ignore")
    model, arguments = _disagreeing(rank, case)
    state = generator_states()
    held = dict(model.named_parameters())
    started = time.perf_counter()
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, DEVICE, **arguments)
    seconds = time.perf_counter() - started
    assert torch.equal(generator_states(), state)
    assert all(p is held[name] for name, p in model.named_parameters())
    dist.barrier()
    return str(caught.value), seconds


def _disagreeing(rank: int, case: str) -> tuple[nn.Module, dict[str, Any]]:
    """Build a sharded model that differs on the last of the ranks in one respect."""
    odd = rank == dist.get_world_size() - 1
    arguments: dict[str, Any] = {"seed": 1}
    torch.manual_seed(0)
    if case == "structure":
        model: nn.Module = di.deferred_init(Net, 6 if odd else 5)
    elif case == "real":
        model = Net() if odd else di.deferred_init(Net)
    elif case == "order":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))
        model.blocks = nn.ModuleList()
    else:
        model = di.deferred_init(Net)
    if case == "seed":
        arguments["seed"] = 2 if odd else 1
    elif case == "state":
        torch.manual_seed(rank)
        arguments["seed"] = None
    elif case == "recipe":
        arguments["recipe"] = "gpt2" if odd else "llama"
    elif case == "dtype":
        arguments["dtype"] = torch.bfloat16 if odd else None
    elif case == "rng":
        arguments["rng"] = "by_name" if odd else "eager"
    elif case == "torch":
        torch.__version__ = "0.0.1" if odd else "0.0.2"  # type: ignore[assignment]
    elif case == "CPU":
        kind = "AVX512" if odd else "DEFAULT"
        torch.backends.cpu.get_cpu_capability = lambda: kind
    elif case == "Transformer Engine":
        stand_in = types.ModuleType("transformer_engine")
        stand_in.__version__ = "2.20.2" if odd else "2.19.0"  # type: ignore[attr-defined]
        sys.modules["transformer_engine"] = stand_in
    elif case == "order" and odd:
        di.register_initializer(nn.LayerNorm, lambda module: module.reset_parameters())
    elif case == "no plan":
        nn.Module.register_buffer(model, "lost", torch.empty(2, device="meta"))
        model.lost = model.lost if odd else torch.zeros(2)
    shard(model, "fsdp")
    return model, arguments


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("seed", "seed: 1 on ranks 0-1, 2 on rank 2"),
        ("state", "state of the random generator: "),
        ("recipe", "recipe: llama"),
        ("dtype", "dtype: None on ranks 0-1, torch.bfloat16 on rank 2"),
        ("rng", "rng: eager on ranks 0-1, by_name on rank 2"),
        ("torch", "torch: 0.0.2 on ranks 0-1, 0.0.1 on rank 2"),
        pytest.param(
            "CPU",
            "kind of device: DEFAULT on ranks 0-1, AVX512 on rank 2",
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="is about CPUs"),
        ),
        ("Transformer Engine", "Engine: 2.19.0 on ranks 0-1, 2.20.2 on rank 2"),
        ("order", "`step 2`: 1 by LayerNorm.reset_parameters on ranks 0-1, 1 by "),
        ("structure", "`embed.weight`: parameter [11, 5] torch.float32"),
        ("real", "deferred on ranks 0-1, parameter"),
    ],
)
def test_every_disagreement_is_refused_on_all_ranks_with_all_values(
    ranks: Ranks, case: str, said: str
) -> None:
    changes_process = case in ("torch", "CPU", "Transformer Engine", "order")
    pool = RankPool(3) if changes_process else ranks(3)
    answers = pool.run(_refused, case, 3)
    for text, seconds in answers:
        assert text.startswith("the ranks disagree; nothing was changed:")
        assert said in text
        assert seconds < 10
    if case == "real":
        assert "broadcast_from=<that rank>`, before it is sharded" in answers[0][0]
    if changes_process:
        pool.end()


def test_a_rank_without_a_plan_stops_the_others(ranks: Ranks) -> None:
    texts = [text for text, _ in ranks(3).run(_refused, "no plan", 3)]
    assert "there is no plan on rank 2: PlanError: 1 tensor has no init" in texts[0]
    assert texts[0] == texts[1]
    assert texts[2].startswith("1 tensor has no initializer: `lost`")


def _fails_on_one(rank: int) -> str:
    warnings.simplefilter("ignore")
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    held = dict(model.named_parameters())
    torch.manual_seed(0)
    state = generator_states()
    fill = nn.Module.register_parameter

    def refresh(*_args: object) -> None:
        if rank == 1:
            raise OSError("the disk is on fire")

    from deferred_init.handlers import registry

    registry.add_refresher(type("Broken", (), {"refresh": refresh})())
    try:
        with pytest.raises(di.MaterializeError) as caught:
            di.materialize(model, DEVICE, seed=None)
    finally:
        registry._refreshers.pop()
    assert fill is nn.Module.register_parameter
    assert torch.equal(generator_states(), state)
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
        assert parameter.is_meta
    report = di.materialize(model, DEVICE, seed=1)
    assert report.ok
    return str(caught.value)


def test_a_rank_that_fails_makes_all_ranks_roll_back(ranks: Ranks) -> None:
    texts = ranks(3).run(_fails_on_one)
    assert texts[0] == texts[2]
    assert "it failed on rank 1: OSError: the disk is on fire" in texts[0]
    assert "put back as they were" in texts[0]
    assert texts[1].startswith("OSError: the disk is on fire")


def _one_stays_away(rank: int) -> str:
    warnings.simplefilter("ignore")
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    text = ""
    di.plan(model, DEVICE, seed=1)  # imports what is needed, which takes its time
    dist.barrier()
    if rank != 1:
        with pytest.raises(di.PlanError) as caught:
            di.materialize(model, DEVICE, seed=1, rank_timeout_s=6.0)
        text = str(caught.value)
        assert all(parameter.is_meta for parameter in model.parameters())
    return text


def test_a_rank_that_does_not_come_is_named_instead_of_waited_for_forever() -> None:
    pool = RankPool(3)
    started = time.perf_counter()
    texts = pool.run(_one_stays_away)
    assert "rank 1 of 0-2 did not come within 6 s" in texts[0]
    assert texts[0] == texts[2]
    assert time.perf_counter() - started < 60
    processes = pool.processes
    pool.end()
    assert not any(process.is_alive() for process in processes)


def _dies(rank: int) -> str:
    import os

    warnings.simplefilter("ignore")
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    if rank == 1:

        def die(*_args: object) -> None:
            os._exit(9)

        from deferred_init.handlers import registry

        registry.add_refresher(type("Deadly", (), {"refresh": die})())
    di.plan(model, DEVICE, seed=1)
    with pytest.raises(di.MaterializeError) as caught:
        di.materialize(model, DEVICE, seed=1, rank_timeout_s=6.0)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(caught.value)


def test_the_others_roll_back_within_the_time_out_when_a_rank_is_killed() -> None:
    pool = RankPool(3)
    with pytest.raises(AssertionError) as caught:
        pool.run(_dies)
    # Only the killed one gives no answer: the others raised as expected.
    assert str(caught.value) == "rank 1: the process has ended"
    assert not pool.processes


def _first_stays_away(rank: int) -> str:
    meeting = Meeting((0, 1), 0.2, "a test")
    if rank == 0:
        return ""
    with pytest.raises(RanksMissing) as caught:
        meeting.decide("here", lambda answers: None)
    return str(caught.value)


def test_a_missing_first_rank_is_named_as_well() -> None:
    pool = RankPool(2)
    texts = pool.run(_first_stays_away)
    pool.end()
    assert texts[1].startswith("rank 0 did not come within 5.2 s")


def _votes(rank: int) -> list[int]:
    return [
        Meeting((0, 1, 2), 30.0, "a test").decide(
            rank + turn, lambda a: sum(a.values())
        )
        for turn in range(5)
    ]


def test_meetings_follow_each_other_and_all_hear_the_same_verdict(
    ranks: Ranks,
) -> None:
    assert ranks(3).run(_votes) == [[3, 6, 9, 12, 15]] * 3


def test_runs_of_ranks_are_joined_when_they_are_spelled() -> None:
    assert spell_ranks([5, 0, 1, 2]) == "0-2, 5"
    assert spell_ranks([3]) == "3"


def _loads_on_unlike_cpus(rank: int) -> None:
    warnings.simplefilter("ignore")
    kind = "AVX512" if rank else "DEFAULT"
    torch.backends.cpu.get_cpu_capability = lambda: kind
    torch.manual_seed(5)
    expected = nn.Linear(4, 3)
    model = di.deferred_init(nn.Linear, 4, 3)
    fully_shard(model)
    di.materialize(model, DEVICE, weights=expected.state_dict(), seed=1)
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(full, dict(expected.named_parameters())[name])


def test_ranks_on_unlike_devices_may_load_what_they_do_not_draw() -> None:
    pool = RankPool(2)
    pool.run(_loads_on_unlike_cpus)
    pool.end()

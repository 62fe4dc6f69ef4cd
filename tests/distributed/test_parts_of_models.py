"""A rank makes a part alone: pipeline stages, experts, shards by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE, generator_states
from models import Untied, compare, eager
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import deferred_init as di

Ranks = Callable[[int], RankPool]


def _whole() -> Any:
    return nn.ModuleDict({f"layer{i}": nn.Linear(6, 6) for i in range(4)})


def _stage(rank: int, rng: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = _whole()
    for index in range(4):
        if index // 2 != rank:
            del model[f"layer{index}"]
    di.materialize(model, DEVICE, seed=8, rng=rng)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("rng", ["by_name", "fast"])
def test_pipeline_stages_made_by_name_agree_with_the_whole(
    ranks: Ranks, rng: str
) -> None:
    with torch.device("meta"):
        model = _whole()
    di.materialize(model, DEVICE, seed=8, rng=rng)
    stages = ranks(2).run(_stage, rng)
    made = {**stages[0], **stages[1]}
    assert list(made) == [name for name, _ in model.named_parameters()]
    for name, value in model.named_parameters():
        assert torch.equal(made[name], value.cpu())


def _by_name(_rank: int, built: str, rng: str) -> None:
    warnings.simplefilter("ignore")

    def make() -> Any:
        return Untied()

    def deferred() -> Any:
        if built == "recorded":
            return di.deferred_init(make)
        with torch.device("meta"):
            return make()

    expected = deferred()
    di.materialize(expected, DEVICE, seed=8, rng=rng)
    model = deferred()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    state = generator_states()
    di.materialize(model, DEVICE, seed=8, rng=rng)
    assert torch.equal(generator_states(), state)
    compare(model, expected)


@pytest.mark.parametrize("rng", ["by_name", "fast"])
@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_names_give_the_same_values_whatever_the_sharding(
    ranks: Ranks, built: str, rng: str
) -> None:
    ranks(2).run(_by_name, built, rng)


class Counted(nn.Module):
    """Counts how often its init code runs."""

    runs = 0

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.empty(rows, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        Counted.runs += self.weight.device.type != "meta"

    def forward(self, x: Any) -> Any:
        return x @ self.weight.t()


def _skipped(rank: int, rng: str) -> int:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        expected: Any = nn.Sequential(Counted(2), Counted(9))
        model: Any = nn.Sequential(Counted(2), Counted(9))
    di.materialize(expected, DEVICE, seed=1, rng=rng)
    fully_shard(model)
    Counted.runs = 0
    di.materialize(model, DEVICE, seed=1, rng=rng)
    runs = Counted.runs
    compare(model, expected)
    return runs


def test_by_name_a_rank_draws_nothing_that_it_keeps_no_part_of(ranks: Ranks) -> None:
    # Two rows over three ranks leave the last one without any.
    assert ranks(3).run(_skipped, "by_name") == [2, 2, 1]
    assert ranks(3).run(_skipped, "eager") == [2, 2, 2]


def _experts(rank: int) -> None:
    warnings.simplefilter("ignore")

    def make() -> Any:
        return nn.ModuleDict({f"expert{i}": nn.Linear(4, 4) for i in range(4)})

    expected = eager(make, 2)
    model: Any = di.deferred_init(make)
    mine = [f"expert{i}" for i in range(4) if i % 2 == rank]
    for name in list(model):
        if name not in mine:
            del model[name]
    di.materialize(model, DEVICE, seed=2)
    for name in mine:
        assert torch.equal(model[name].weight, expected[name].weight)
        assert torch.equal(model[name].bias, expected[name].bias)


def test_a_subset_of_experts_of_a_recorded_model_equals_eager(ranks: Ranks) -> None:
    ranks(2).run(_experts)


def _outside(rank: int) -> None:
    warnings.simplefilter("ignore")
    expected = eager(Untied, 6)
    pair = DeviceMesh(DEVICE, [0, 1])
    model: Any = di.deferred_init(Untied)
    if rank < 2:
        fully_shard(model, mesh=pair)
    di.materialize(model, DEVICE, seed=6)
    if rank < 2:
        compare(model, expected)
    else:
        assert torch.equal(model.head.weight, expected.head.weight)
    dist.barrier()


def test_ranks_outside_of_a_mesh_are_not_waited_for(ranks: Ranks) -> None:
    ranks(3).run(_outside)

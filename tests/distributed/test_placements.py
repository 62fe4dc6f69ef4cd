"""Any placements on any mesh: what a rank keeps is what DTensor puts together again."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from backend import DEVICE
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import deferred_init as di

Ranks = Callable[[int], RankPool]
SHAPES = ((8, 6), (5, 3), (1, 7), (3, 1))


class Table(nn.Module):
    """One parameter of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def _placed(shape: tuple[int, ...], mesh: DeviceMesh, placements: Any) -> Table:
    with torch.device("meta"):
        table = Table(shape)
    data = distribute_tensor(table.weight.detach(), mesh, placements)
    table.weight = nn.Parameter(data)
    return table


def _all_placements(_rank: int, shape: tuple[int, ...], axes: int) -> int:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(DEVICE, (4,) if axes == 1 else (2, 2))
    done = 0
    for placements in itertools.product(
        (Replicate(), Shard(0), Shard(1), Shard(-1)), repeat=axes
    ):
        torch.manual_seed(done)
        expected = Table(shape)
        table = _placed(shape, mesh, placements)
        held, placed = table.weight, table.weight.placements
        di.materialize(table, DEVICE, seed=done)
        assert table.weight is held
        assert held.placements == placed
        assert torch.equal(held.full_tensor(), expected.weight), placements
        again = distribute_tensor(
            expected.weight.detach(), mesh, placements, src_data_rank=None
        )
        assert torch.equal(held._local_tensor, again._local_tensor), placements
        done += 1
    return done


def test_every_pair_of_placements_equals_eager(ranks: Ranks) -> None:
    for shape in SHAPES:
        assert ranks(4).run(_all_placements, shape, 2) == [16] * 4


def test_more_ranks_than_rows_leave_empty_shards(ranks: Ranks) -> None:
    for shape in SHAPES:
        assert ranks(4).run(_all_placements, shape, 1) == [4] * 4


def _three_axes(_rank: int) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(DEVICE, (2, 1, 2))
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=3):
        torch.manual_seed(1)
        expected = Table((5, 6))
        table = _placed((5, 6), mesh, placements)
        di.materialize(table, DEVICE, seed=1)
        assert torch.equal(table.weight.full_tensor(), expected.weight), placements


def test_meshes_of_three_axes_equal_eager(ranks: Ranks) -> None:
    ranks(4).run(_three_axes)


def _on_dim_one(_rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    expected = nn.Linear(6, 5)
    with torch.device("meta"):
        model = nn.Linear(6, 5)
    fully_shard(
        model, shard_placement_fn=lambda p: Shard(p.dim() - 1 if p.dim() > 1 else 0)
    )
    di.materialize(model, DEVICE, seed=1)
    weight: Any = model.weight
    assert weight.placements == (Shard(1),)
    assert torch.equal(weight.full_tensor(), expected.weight)
    x = torch.ones(2, 6)
    torch.testing.assert_close(model(x), expected(x))


def test_fsdp_may_shard_another_dim(ranks: Ranks) -> None:
    ranks(3).run(_on_dim_one)


def _partial(_rank: int) -> str:
    mesh = init_device_mesh(DEVICE, (2,))
    table = Table((4, 2))
    local = torch.empty(4, 2, device="meta")
    table.weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial()]))
    try:
        di.materialize(table, DEVICE, seed=0)
    except di.PlanError as error:
        return str(error)
    return ""


def test_partial_sums_are_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_partial):
        assert "`weight` (parameter of `Table`) has the placements" in text
        assert "expected no partial sums" in text


def _buffers(_rank: int) -> None:
    warnings.simplefilter("ignore")

    def make() -> Any:
        norm = nn.BatchNorm1d(6)
        norm.extra = nn.Linear(6, 3)
        norm.register_buffer("steps", torch.arange(6) * 2)
        return norm

    torch.manual_seed(4)
    expected = make()
    model = di.deferred_init(make)
    distribute_module(model, init_device_mesh(DEVICE, (3,)))
    assert isinstance(model.running_var, DTensor)
    di.materialize(model, DEVICE, seed=4)
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        owner, _, key = name.rpartition(".")
        got: Any = getattr(model.get_submodule(owner), key)
        assert isinstance(got, DTensor)
        assert isinstance(got, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert torch.equal(got.full_tensor(), tensor), name


def test_replicated_buffers_and_parameters_equal_eager(ranks: Ranks) -> None:
    ranks(3).run(_buffers)


class Untouched(nn.Linear):
    """A module whose init code forgets the bias."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def _forgotten(_rank: int, verify: str) -> list[tuple[str, str]]:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model: Any = Untouched(6, 16)
    di.register_initializer(Untouched, lambda module: module.reset_parameters())
    fully_shard(model)
    report = di.materialize(model, DEVICE, seed=0, verify=verify, strict=False)
    assert not model.bias.is_meta
    assert torch.equal(model.weight.full_tensor(), torch.ones(16, 6))
    return [(finding.code, finding.fqn) for finding in report.findings]


def test_what_init_code_forgets_is_found_by_its_poison(ranks: Ranks) -> None:
    pool = RankPool(2)  # of its own, for the initializer that is registered there
    for found in pool.run(_forgotten, "full"):
        assert ("poison-left", "bias") in found
    pool.end()


def _peak(_rank: int) -> list[int]:
    """Count the full-size bytes that are alive at once while a model is filled."""
    warnings.simplefilter("ignore")
    from deferred_init import staging

    with torch.device("meta"):
        model = nn.Transformer(16, 2, 2, 2, 64, batch_first=True)
    fully_shard(model)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    seen = [0]
    heat = staging.Loan.heat
    alive: list[Any] = []

    def watched(loan: Any) -> Any:
        memory = heat(loan)
        alive.append(loan)
        seen[0] = max(seen[0], sum(each.full_bytes for each in alive if each.hot))
        return memory

    staging.Loan.heat = watched  # type: ignore[assignment,method-assign]
    try:
        di.materialize(model, DEVICE, seed=0)
    finally:
        staging.Loan.heat = heat  # type: ignore[method-assign]
    return [seen[0], largest]


def test_init_code_of_a_whole_model_has_one_large_tensor_at_a_time(
    ranks: Ranks,
) -> None:
    for seen, largest in ranks(2).run(_peak):
        assert 0 < seen <= largest

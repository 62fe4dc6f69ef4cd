"""A model that is real on one rank only is handed to the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE
from models import Net, compare, shard, train
from rank_pool import RankPool
from torch import nn

import deferred_init as di

Ranks = Callable[[int], RankPool]


def _mixed(rank: int, source: int) -> Any:
    """Build a model that was trained for a step on the source, deferred elsewhere."""
    warnings.simplefilter("ignore")
    torch.manual_seed(40 + rank)
    if rank != source:
        return di.deferred_init(Net) if rank % 2 else _on_meta()
    return _loaded()


def _on_meta() -> Any:
    with torch.device("meta"):
        return Net()


def _loaded() -> Any:
    torch.manual_seed(99)
    model: Any = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.half_open = nn.Parameter(torch.randn(3, 2).t().to(torch.bfloat16))
    return model


def _handed_over(rank: int, source: int) -> None:
    model = _mixed(rank, source)
    if rank != source:
        empty = torch.empty(3, 2, device="meta", dtype=torch.bfloat16).t()
        model.half_open = nn.Parameter(empty)
    held = dict(model.named_parameters())
    report = di.materialize(model, DEVICE, broadcast_from=source)
    expected = _loaded()
    compare(model, expected)
    assert model.head.weight is model.embed.weight
    assert all(p is held[name] for name, p in model.named_parameters())
    assert model.half_open.stride() == (1, 2)
    assert bool(report.steps) == (rank != source)
    del model.half_open, expected.half_open  # FSDP2 wants contiguous parameters
    shard(model, "fsdp")
    compare(model, expected)


@pytest.mark.parametrize("source", [0, 2])
def test_all_ranks_get_the_values_of_the_one_that_has_them(
    ranks: Ranks, source: int
) -> None:
    ranks(3).run(_handed_over, source)


def _partly(rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    expected = Net()
    torch.manual_seed(7)
    model: Any = di.deferred_init(Net)
    if rank == 0:
        di.materialize_module(model.blocks)
    if rank == 1:
        with torch.no_grad():
            model.positions = torch.arange(3.0) / 3
    di.materialize(model, DEVICE, seed=7, broadcast_from=0)
    compare(model, expected)


def test_what_the_source_lacks_is_made_there_first(ranks: Ranks) -> None:
    ranks(2).run(_partly)


def _cast(rank: int) -> None:
    model = _mixed(rank, 0)
    if rank == 0:
        del model.half_open
    di.materialize(model, DEVICE, broadcast_from=0, dtype=torch.bfloat16)
    if rank:
        assert model.blocks[0].up.weight.dtype is torch.bfloat16
    reference = _loaded().blocks[0].up.weight.to(torch.bfloat16)
    assert torch.equal(model.blocks[0].up.weight.to(torch.bfloat16), reference)


def test_receivers_may_ask_for_another_dtype(ranks: Ranks) -> None:
    ranks(2).run(_cast)


def _refused(rank: int, case: str) -> str:
    warnings.simplefilter("ignore")
    model: Any = Net() if rank == 0 else di.deferred_init(Net)
    if case == "sharded":
        shard(model, "fsdp")
    elif rank == 0:
        model.blocks[1].up = nn.Linear(5, 9)
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, DEVICE, broadcast_from=0)
    dist.barrier()
    return str(caught.value)


def test_a_model_that_is_sharded_already_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_refused, "sharded"):
        assert "tensors are sharded already: `embed.weight`" in text
        assert "materialize(model, broadcast_from=0) first, then shard" in text


def test_models_of_different_shape_are_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_refused, "structure"):
        assert (
            "`blocks.1.up.weight`: parameter [9, 5] torch.float32 trained on rank 0, "
            "parameter [7, 5] torch.float32 trained on rank 1" in text
        )


def _unlike(rank: int, sizes: tuple[int | None, int]) -> str:
    """Hand over a model with a table of so many elements, or none, on each rank."""
    warnings.simplefilter("ignore")
    model: Any = nn.Linear(2, 2, device="meta" if rank else DEVICE)
    if (size := sizes[rank]) is not None:
        model.table = [torch.empty(size, device="meta" if rank else DEVICE)]
    with pytest.raises(di.MaterializeError) as caught:
        di.materialize(model, DEVICE, broadcast_from=0)
    assert model.weight.is_meta == bool(rank)
    return str(caught.value)


def test_a_source_that_lacks_a_tensor_stops_all_ranks(ranks: Ranks) -> None:
    for text in ranks(2).run(_unlike, (None, 3)):
        assert "rank 0 does not have `table[0]`, which is deferred on" in text


def test_a_tensor_of_another_size_on_another_rank_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_unlike, (3, 4)):
        assert "`table[0]` has 12 bytes on rank 0, 16 bytes on rank 1" in text


def test_a_broadcast_without_a_process_group_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a process group: call"):
        di.materialize(nn.Linear(2, 2), DEVICE, broadcast_from=0)


def _wrong_source(_rank: int) -> None:
    with pytest.raises(ValueError, match="must be a rank of 0 to 1, found 5"):
        di.materialize(nn.Linear(2, 2), DEVICE, broadcast_from=5)


def test_a_source_that_is_no_rank_is_refused(ranks: Ranks) -> None:
    ranks(2).run(_wrong_source)


def test_a_time_out_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="rank_timeout_s must be positive, found 0"):
        di.materialize(nn.Linear(2, 2), DEVICE, rank_timeout_s=0)

"""Under `rng="fast"` a rank writes its part alone, with the values of the whole."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE, generator_states
from models import LAYOUTS, MetaNet, Net, compare, deferred, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.slicing import Axis, copy_region, region_of, window_of
from deferred_init.handlers.dtensor import DTensorAllocator

Ranks = Callable[[int], RankPool]
CASES = [(layout, world) for layout, worlds in LAYOUTS.items() for world in worlds]


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 6, 3)])
def test_windows_hold_the_indices_of_regions(shape: tuple[int, ...]) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim, size in itertools.product(range(len(shape)), (1, 2, 3, 4)):
        for rank in range(size):
            region = region_of(shape, [Axis(dim=dim, size=size, rank=rank)])
            part = torch.empty(region.shape, dtype=torch.int64)
            copy_region(part, full, region)
            window = window_of(shape, region)
            assert window is not None
            place = torch.arange(window.numel)
            row = place // max(window.length, 1)
            index = window.start + row * window.stride + place - row * window.length
            assert torch.equal(index, part.flatten())


def test_what_is_cut_in_two_dims_is_no_window() -> None:
    axes = [Axis(dim=0, size=2, rank=1), Axis(dim=1, size=2, rank=0)]
    assert window_of((4, 4), region_of((4, 4), axes)) is None


def _values(_rank: int, layout: str, built: str) -> None:
    warnings.simplefilter("ignore")
    make = Net if built == "recorded" else MetaNet
    expected = deferred(built, make)
    di.materialize(expected, DEVICE, seed=8, rng="fast")
    model = deferred(built, make)
    shard(model, layout)
    state = generator_states()
    report = di.materialize(model, DEVICE, seed=8, rng="fast", verify="full")
    assert report.ok
    assert torch.equal(generator_states(), state)
    compare(model, expected)


@pytest.mark.parametrize("built", ["recorded", "meta"])
@pytest.mark.parametrize(("layout", "world"), CASES)
def test_values_are_those_of_one_process(
    ranks: Ranks, layout: str, world: int, built: str
) -> None:
    ranks(world).run(_values, layout, built)


def _count_cut(rng: str, built: str) -> int:
    """Count the parameters that are cut out of a tensor of full size."""
    model = deferred(built, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)))
    fully_shard(model)
    cut = []
    part_of = DTensorAllocator.part_of

    def counted(self: Any, tensor: torch.Tensor, full: torch.Tensor, *more: Any) -> Any:
        cut.append(full.shape)
        return part_of(self, tensor, full, *more)

    DTensorAllocator.part_of = counted  # type: ignore[method-assign]
    try:
        di.materialize(model, DEVICE, seed=1, rng=rng)
    finally:
        DTensorAllocator.part_of = part_of  # type: ignore[method-assign]
    return len(cut)


def _cut(_rank: int, built: str) -> tuple[int, int]:
    warnings.simplefilter("ignore")
    return _count_cut("fast", built), _count_cut("by_name", built)


@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_a_rank_makes_nothing_of_full_size(ranks: Ranks, built: str) -> None:
    assert ranks(2).run(_cut, built) == [(0, 4), (0, 4)]


class Reads(nn.Linear):
    """Reads and changes what a fill wrote."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data.mul_(2.0)
        nn.init.uniform_(self.bias)
        nn.init.uniform_(self.bias, 1.0, 2.0)


def _mixed() -> nn.Module:
    embedding = nn.Embedding(9, 4, padding_idx=3)
    wide = nn.Linear(4, 6, dtype=torch.float64)  # seeded by name, in full size
    return nn.Sequential(Reads(4, 6), embedding, wide, nn.Transformer(4, 2, 1, 1, 8))


def _read_again(_rank: int, verify: str, built: str) -> None:
    warnings.simplefilter("ignore")
    expected, model = deferred(built, _mixed), deferred(built, _mixed)
    di.materialize(expected, DEVICE, seed=3, rng="fast")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert di.materialize(model, DEVICE, seed=3, rng="fast", verify=verify).ok
    compare(model, expected)


@pytest.mark.parametrize("built", ["recorded", "meta"])
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_a_fill_that_is_read_again_is_made_in_full(
    ranks: Ranks, verify: str, built: str
) -> None:
    ranks(2).run(_read_again, verify, built)

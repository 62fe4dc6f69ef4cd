"""What is done to a recorded model between its constructor and its sharding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE, generator_states
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deferred_init as di

Ranks = Callable[[int], RankPool]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.middle = nn.Linear(8, 6)
        self.head = nn.Linear(8, 8, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.head.weight, std=0.5)


def _tied(model: Any) -> None:
    """The first in the tree takes what the last one has, as torchtitan ties."""
    model.embed.weight = model.head.weight


def _exchanged(model: Any) -> None:
    model.embed.weight, model.head.weight = model.head.weight, model.embed.weight


def _given_to_another_module(model: Any) -> None:
    taken = nn.Linear(8, 6, device="meta")
    taken.weight, taken.bias = model.middle.weight, model.middle.bias
    taken.weight.mine = "kept"
    model.middle = taken


def _module_copied(model: Any) -> None:
    """As torchtitan copies the whole model for each stage of a pipeline."""
    model.middle = copy.deepcopy(model.middle)


def _replaced(model: Any) -> None:
    model.middle.weight = nn.Parameter(model.middle.weight.detach() * 2)


def _replaced_twice(model: Any) -> None:
    _replaced(model)
    _replaced(model)


def _data_assigned(model: Any) -> None:
    model.middle.weight.data = model.middle.weight.data * 3


def _written(model: Any) -> None:
    with torch.no_grad():
        model.middle.weight.mul_(2)


def _cast(model: Any) -> None:
    model.double()


CHANGES = [
    *(_exchanged, _given_to_another_module, _module_copied, _replaced),
    *(_replaced_twice, _data_assigned, _written, _cast),
]
LAYOUTS = ["fsdp", "tp", "one rank an axis"]
_PLAN = {
    "embed": ColwiseParallel(),
    "middle": ColwiseParallel(),
    "head": RowwiseParallel(),
}


def _shard(model: nn.Module, layout: str) -> None:
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
    elif layout == "one rank an axis":
        mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], _PLAN)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "tp":
        parallelize_module(model, init_device_mesh(DEVICE, (2,)), _PLAN)
    else:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], _PLAN)
        fully_shard(model, mesh=mesh["dp"])


def _is_as_on_one_device(_rank: int, change: Callable[[Any], None], layout: str) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    with torch.device(DEVICE):
        expected = _Net()
    state = generator_states()
    change(expected)
    model = di.deferred_init(_Net)
    change(model)
    _shard(model, layout)
    report = di.materialize(model, DEVICE, seed=5)
    assert torch.equal(generator_states(), state)
    made = dict(model.named_parameters(remove_duplicate=False))
    for name, wanted in expected.named_parameters(remove_duplicate=False):
        found = made[name]
        assert isinstance(found, DTensor)
        assert found.dtype == wanted.dtype
        assert torch.equal(found.full_tensor(), wanted), name
        assert getattr(found, "mine", None) == getattr(wanted, "mine", None)
    assert all(step.source == "recording" for step in report.steps)
    return str(report.assumptions)


# The two ends of what is tied are not sharded along one dim in the others.
CASES = [
    ("fsdp", _tied),
    *((layout, change) for layout in LAYOUTS for change in CHANGES),
]


@pytest.mark.parametrize(("layout", "change"), CASES)
def test_two_ranks_get_what_one_device_has(
    ranks: Ranks, layout: str, change: Callable[[Any], None]
) -> None:
    assert ranks(2).run(_is_as_on_one_device, change, layout) == ["()", "()"]


@pytest.mark.parametrize("change", CHANGES)
def test_so_do_four_with_both_ways_of_sharding(
    ranks: Ranks, change: Callable[[Any], None]
) -> None:
    assert ranks(4).run(_is_as_on_one_device, change, "both") == ["()"] * 4


def _write(model: Any) -> None:
    nn.init.normal_(model.head.weight)
    with torch.no_grad():
        model.middle.bias.mul_(2)


def _written_when_sharded(_rank: int, layout: str) -> tuple[str, tuple[str, ...]]:
    warnings.simplefilter("ignore")
    model = di.deferred_init(_Net)
    _shard(model, layout)
    _write(model)
    try:
        di.materialize(model, DEVICE, seed=5)
    except di.PlanError as error:
        text = str(error)
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta"):
        model = _Net()
    _shard(model, layout)
    _write(model)
    return text, di.materialize(model, DEVICE, seed=5).assumptions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_to_shards_without_memory_is_not_lost_in_silence(
    ranks: Ranks, layout: str
) -> None:
    for text, assumptions in ranks(2).run(_written_when_sharded, layout):
        assert "`head.weight` (parameter of `Linear`) was written after it" in text
        assert "`middle.bias` (parameter of `Linear`) was written after it" in text
        assert "in the one that `deferred_init(...)` records" in text
        assert "embed" not in text
        (said,) = [text for text in assumptions if "what was written there" in text]
        assert "`middle.bias`" in said
        assert "embed" not in said


def _loaded(_rank: int) -> None:
    warnings.simplefilter("ignore")
    model = di.deferred_init(_Net)
    _shard(model, "fsdp")
    _write(model)
    source = _Net().state_dict()
    di.materialize(model, DEVICE, weights=source)
    weight: Any = model.head.weight
    assert torch.equal(weight.full_tensor().cpu(), source["head.weight"].cpu())


def test_it_is_no_matter_where_values_are_loaded(ranks: Ranks) -> None:
    ranks(2).run(_loaded)

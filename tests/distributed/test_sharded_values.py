"""A sharded model equals the one that a single process makes, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from backend import DEVICE, generator_states
from models import LAYOUTS, MetaNet, Net, compare, deferred, shard, train
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.attributes import attributes_kept

Ranks = Callable[[int], RankPool]
CASES = [(layout, world) for layout, worlds in LAYOUTS.items() for world in worlds]


def _values(_rank: int, layout: str, built: str) -> None:
    warnings.simplefilter("ignore")
    make = Net if built == "recorded" else MetaNet
    torch.manual_seed(11)
    if built == "recorded":
        expected: nn.Module = make()
    else:
        # Eager construction without the draws for buffers that meta leaves out.
        expected = _eager_without_buffer_draws()
    state = generator_states()
    model = deferred(built, make)
    shard(model, layout)
    held = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in held.values() if p.requires_grad], lr=0.1)
    report = di.materialize(model, DEVICE, seed=11, optimizers=[optimizer])
    assert report.ok
    assert torch.equal(generator_states(), state)
    compare(model, expected)
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
    assert model.head.weight is model.embed.weight
    reference = torch.optim.AdamW(
        [p for p in expected.parameters() if p.requires_grad], lr=0.1
    )
    got, wanted = train(model, optimizer), train(expected, reference)
    tolerance = 0.05 if layout == "mixed precision" else 1e-5
    assert got == pytest.approx(wanted, rel=tolerance)


def _eager_without_buffer_draws() -> nn.Module:
    original = torch.rand
    torch.rand = lambda *size: torch.empty(*size)  # type: ignore[assignment]
    try:
        return MetaNet()
    finally:
        torch.rand = original


@pytest.mark.parametrize(("layout", "world"), CASES)
def test_a_recorded_model_sharded_before_equals_eager_and_trains_alike(
    ranks: Ranks, layout: str, world: int
) -> None:
    ranks(world).run(_values, layout, "recorded")


@pytest.mark.parametrize(("layout", "world"), CASES)
def test_a_model_on_meta_sharded_before_equals_eager_and_trains_alike(
    ranks: Ranks, layout: str, world: int
) -> None:
    ranks(world).run(_values, layout, "meta")


def _sharded_after(_rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    expected = Net()
    model = di.deferred_init(Net)
    di.materialize(model, DEVICE, seed=5)
    shard(model, "fsdp")
    compare(model, expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert train(model, optimizer) == pytest.approx(train(expected, reference), 1e-5)
    assert di.audit(model, optimizers=[optimizer]).ok


def test_a_model_may_be_sharded_after_it_was_materialized(ranks: Ranks) -> None:
    ranks(2).run(_sharded_after)


def _composite(_rank: int) -> None:
    warnings.simplefilter("ignore")
    from torch.distributed.fsdp import fully_shard

    def make() -> nn.Module:
        return nn.Transformer(8, 2, 1, 1, 16)

    torch.manual_seed(3)
    expected = make()
    state = generator_states()
    model = deferred("meta", make)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=3)
    compare(model, expected)
    assert torch.equal(generator_states(), state)


def test_init_code_that_rewrites_a_whole_model_sees_full_tensors(
    ranks: Ranks,
) -> None:
    ranks(2).run(_composite)


def _dtype(_rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    expected = Net().to(torch.bfloat16)
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    di.materialize(model, DEVICE, seed=5, dtype=torch.bfloat16)
    compare(model, expected)


def test_a_dtype_that_is_asked_for_reaches_the_shards(ranks: Ranks) -> None:
    ranks(3).run(_dtype)


def _gathers_from_new_memory(_rank: int) -> None:
    warnings.simplefilter("ignore")
    from deferred_init.distributed.fsdp2 import fsdp_params

    model = di.deferred_init(Net)
    shard(model, "fsdp")
    di.materialize(model, DEVICE, seed=5)
    records = list(fsdp_params(model.modules()))
    assert len(records) == 17
    for record in records:
        local = record.sharded_param._local_tensor
        flat = record._sharded_param_data
        assert flat.untyped_storage()._cdata == local.untyped_storage()._cdata
        assert flat.numel() == record.padded_sharded_param_size.numel()


def test_fsdp_gathers_from_the_new_memory_with_its_padding(ranks: Ranks) -> None:
    ranks(3).run(_gathers_from_new_memory)


class Marked(nn.Module):
    """A constructor that marks a parameter, as model code for Megatron does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.weight.tensor_model_parallel = True  # type: ignore[assignment]


def _marks(_rank: int, built: str, order: str) -> None:
    warnings.simplefilter("ignore")
    model = Marked() if built == "real" else deferred(built, Marked)
    model.first.weight.mine = ["kept"]
    model.first.bias.sequence_parallel = True
    model.second.bias.allreduce = False
    mine = model.first.weight.mine
    if order == "last":
        di.materialize(model, DEVICE, seed=0)
    # The recording leads to the attributes by itself.
    kept = built == "recorded" and order == "first"
    with nullcontext() if kept else attributes_kept(model):
        fully_shard(model)
    if order == "first":
        model.second.bias.allreduce = True  # what was said last counts
        di.materialize(model, DEVICE, seed=0)
    weight = model.first.weight
    assert weight is model.second.weight
    assert weight.mine is mine
    assert weight.tensor_model_parallel is True
    assert model.first.bias.sequence_parallel is True
    assert model.second.bias.allreduce is (order == "first")
    assert "_fsdp_orig_uid" not in vars(weight)
    assert not di.audit(model, verify="full").findings


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("built", ["recorded", "meta", "real"])
def test_attributes_of_parameters_survive_sharding(
    ranks: Ranks, built: str, order: str
) -> None:
    ranks(2).run(_marks, built, order)

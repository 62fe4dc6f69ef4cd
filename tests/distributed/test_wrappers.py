"""DDP, FSDP1, pipeline stages and experts; initializers of all kinds on shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE, generator_states
from models import Net, compare, shard, train
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import deferred_init as di
from deferred_init import Recipe
from deferred_init.init_rules import InitSizes

Ranks = Callable[[int], RankPool]


def _eager(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def _ddp(_rank: int) -> None:
    warnings.simplefilter("ignore")
    expected = _eager(Net, 4)
    model: Any = di.deferred_init(Net)
    di.materialize(model, DEVICE, seed=4)
    wrapped = DistributedDataParallel(model)
    compare(model, expected)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert train(wrapped, optimizer) == pytest.approx(train(expected, reference), 1e-5)


def test_a_model_is_materialized_before_ddp_wraps_it(ranks: Ranks) -> None:
    ranks(2).run(_ddp)


def _fsdp1(_rank: int, built: str) -> None:
    warnings.simplefilter("ignore")
    expected = _eager(Untied, 4)
    torch.manual_seed(4)
    if built == "recorded":
        model: Any = di.deferred_init(Untied)
    else:
        with torch.device("meta"):
            model = Untied()
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        param_init_fn=di.param_init_fn(device=DEVICE),
        device_id=torch.device(DEVICE),
        use_orig_params=True,
    )
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for (name, got), want in zip(
            wrapped.named_parameters(), expected.parameters(), strict=True
        ):
            assert got.shape == want.shape, name
            if built == "recorded":
                assert torch.equal(got, want), name
            else:
                assert 0 < got.abs().max() < 4, name
    loss = wrapped(torch.tensor([[1, 2, 3]])).square().mean()
    loss.backward()


class Untied(nn.Module):
    """FSDP1 wants ties inside one unit; this model has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 9)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_fsdp1_fills_its_units_with_param_init_fn(ranks: Ranks, built: str) -> None:
    ranks(2).run(_fsdp1, built)


def _wrapped_too_early(_rank: int) -> str:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    wrapped = nn.Module()
    wrapped.inner = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped.inner)
    wrapped.inner.module = model
    with pytest.raises(di.PlanError) as caught:
        di.materialize(wrapped, DEVICE)
    return str(caught.value)


def test_a_deferred_model_inside_ddp_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_wrapped_too_early):
        assert "materialize the bare model first, then wrap it in DDP" in text


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

    expected = _eager(make, 2)
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
    expected = _eager(Untied, 6)
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


def _rules(_rank: int, preset: str) -> None:
    warnings.simplefilter("ignore")
    recipe = Recipe.load(preset)
    sizes = InitSizes(num_layers=2, hidden_size=5)
    recipe = replace(recipe, init_sizes=sizes)
    torch.manual_seed(0)
    expected: Any = di.deferred_init(Net)
    di.materialize(expected, DEVICE, recipe, seed=5)
    model: Any = di.deferred_init(Net)
    shard(model, "fsdp")
    di.materialize(model, DEVICE, recipe, seed=5)
    compare(model, expected)


@pytest.mark.parametrize("recipe", ["gpt2", "llama", "small_init", "bf16"])
def test_the_rules_of_a_recipe_see_full_tensors(ranks: Ranks, recipe: str) -> None:
    ranks(2).run(_rules, recipe)


class Scaled(nn.Module):
    """A parent that halves what its child made: it has to read it first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for child in (self.first, self.second):
                child.weight.mul_(0.5)
                child.bias.data.zero_()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def _scaled(_rank: int) -> None:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        expected: Any = Scaled()
        model: Any = Scaled()
    di.materialize(expected, DEVICE, seed=5)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=5)
    compare(model, expected)
    compare(model, _eager(Scaled, 5))


def test_a_parent_that_scales_what_children_made_equals_eager(ranks: Ranks) -> None:
    ranks(2).run(_scaled)


def _transformer(_rank: int, built: str) -> None:
    warnings.simplefilter("ignore")

    def make() -> Any:
        return nn.Transformer(8, 2, 2, 1, 16, batch_first=True)

    expected = _eager(make, 3)
    state = generator_states()
    if built == "recorded":
        model: Any = di.deferred_init(make)
    else:
        with torch.device("meta"):
            model = make()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=3)
    compare(model, expected)
    assert torch.equal(generator_states(), state)


@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_a_sharded_transformer_whose_root_redraws_everything_equals_eager(
    ranks: Ranks, built: str
) -> None:
    ranks(2).run(_transformer, built)


def _rollback(_rank: int) -> None:
    warnings.simplefilter("ignore")
    model: Any = di.deferred_init(Net)
    shard(model, "fsdp")
    from deferred_init.distributed.fsdp2 import fsdp_params

    before = [dict(vars(p)) for p in fsdp_params(model.modules())]
    optimizer = torch.optim.AdamW(model.parameters())

    from deferred_init.handlers import registry

    def refresh(*_args: object) -> None:
        raise OSError("stop")

    registry.add_refresher(type("Broken", (), {"refresh": refresh})())
    try:
        with pytest.raises(di.MaterializeError, match="OSError: stop"):
            di.materialize(model, DEVICE, seed=1, optimizers=[optimizer])
    finally:
        registry._refreshers.pop()
    after = [dict(vars(p)) for p in fsdp_params(model.modules())]
    for old, new in zip(before, after, strict=True):
        assert all(new[key] is value for key, value in old.items())
    assert all(p.is_meta and p._local_tensor.is_meta for p in model.parameters())
    expected = _eager(Net, 1)
    di.materialize(model, DEVICE, seed=1, optimizers=[optimizer])
    compare(model, expected)


def test_a_failure_puts_shards_and_the_wrappers_records_back(ranks: Ranks) -> None:
    ranks(2).run(_rollback)

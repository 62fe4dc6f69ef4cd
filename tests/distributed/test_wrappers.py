"""Models that a wrapper takes over: DDP, FSDP1, the records of FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE
from models import Net, Untied, compare, eager, shard, train
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import deferred_init as di

Ranks = Callable[[int], RankPool]


def _ddp(_rank: int) -> None:
    warnings.simplefilter("ignore")
    expected = eager(Net, 4)
    model: Any = di.deferred_init(Net)
    di.materialize(model, DEVICE, seed=4)
    wrapped = DistributedDataParallel(model)
    compare(model, expected)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert train(wrapped, optimizer) == pytest.approx(train(expected, reference), 1e-5)


def test_a_model_is_materialized_before_ddp_wraps_it(ranks: Ranks) -> None:
    ranks(2).run(_ddp)


def _fsdp1(_rank: int, built: str, use_orig_params: bool) -> None:
    warnings.simplefilter("ignore")
    expected = eager(Untied, 4)
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
        use_orig_params=use_orig_params,
    )
    with FullyShardedDataParallel.summon_full_params(wrapped):
        found = _by_module(wrapped)
        for name, want in _by_module(expected).items():
            got = found[name]
            assert got.shape == want.shape, name
            if built == "recorded":
                assert torch.equal(got, want), name
            else:
                assert 0 < got.abs().max() < 4, name
    loss = wrapped(torch.tensor([[1, 2, 3]])).square().mean()
    loss.backward()


def _by_module(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Find tensors by module: without `use_orig_params` they are plain attributes."""
    modules = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    return {
        (index, name): getattr(module, name)
        for index, module in enumerate(modules)
        for name in ("weight", "bias")
        if hasattr(module, name)
    }


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("built", ["recorded", "meta"])
def test_fsdp1_fills_its_units_with_param_init_fn(
    ranks: Ranks, built: str, use_orig_params: bool
) -> None:
    ranks(2).run(_fsdp1, built, use_orig_params)


def _ignoring(_rank: int) -> None:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Untied()
    wrapped: Any = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        param_init_fn=di.param_init_fn(device=DEVICE),
        device_id=torch.device(DEVICE),
        ignored_modules=[model.head],
        use_orig_params=True,
    )
    assert not any(p.is_meta for p in wrapped.parameters())
    wrapped(torch.tensor([[1, 2, 3]])).square().mean().backward()


def test_fsdp1_may_ignore_a_module_on_meta(ranks: Ranks) -> None:
    ranks(2).run(_ignoring)


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
    expected = eager(Net, 1)
    di.materialize(model, DEVICE, seed=1, optimizers=[optimizer])
    compare(model, expected)


def test_a_failure_puts_shards_and_the_wrappers_records_back(ranks: Ranks) -> None:
    ranks(2).run(_rollback)

"""Transformer Engine under FSDP2, by gloo on CPUs: what is kept of what TE makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import has, te_needs
from te_ranks import Ranks, assert_same, belief, shard
from torch import nn

import deferred_init as di
from tests.trackers import Tracker

pytestmark = [pytest.mark.te, pytest.mark.distributed]
_NAME = "model-parallel-rng"


def _stack(te: Any, device: str) -> nn.Module:
    apart = {"single_grouped_weight": False, "single_grouped_bias": False}
    return nn.Sequential(
        te.Linear(8, 15, device=device),
        te.LayerNormLinear(15, 8, device=device, zero_centered_gamma=True),
        te.LayerNormMLP(8, 16, device=device, activation="swiglu"),
        te.GroupedLinear(
            *(2, 8, 8), device=device, **(apart if has("joined weights") else {})
        ),
        te.LayerNorm(8, device=device),
    )


def _ops(te: Any, device: str) -> Any:
    return te.ops.Sequential(
        te.ops.BasicLinear(8, 15, device=device),
        te.ops.Bias(15, device=device),
        te.ops.Linear(15, 8, device=device),
        te.ops.LayerNorm(8, device=device),
    )


MODELS = {"modules": _stack, "ops": _ops}


def _high_precision(_rank: int, kind: str, order: str) -> None:
    with belief() as te:
        model = MODELS[kind](te, "meta")
        model[0].weight.requires_grad_(False)
        torch.manual_seed(3)
        twin = MODELS[kind](te, "cpu")
        twin[0].weight.requires_grad_(False)
        state = torch.get_rng_state()
    if order == "shard first":
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    held = dict(model.named_parameters())
    assert di.materialize(model, "cpu", seed=3, optimizers=[optimizer]).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param is held[name] for name, param in model.named_parameters())
    if order == "shard last":
        shard(model)
    shard(twin)
    assert_same(model, twin)
    assert not di.audit(model, verify="full").findings


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        pytest.param(
            *("modules", "shard first"),
            marks=te_needs("records of registered parameters"),
        ),
        ("modules", "shard last"),
        ("ops", "shard first"),
        ("ops", "shard last"),
    ],
)
def test_high_precision_shards_equal_those_of_an_eager_model(
    ranks: Ranks, kind: str, order: str
) -> None:
    ranks(2).run(_high_precision, kind, order)


def _parallel_attributes(_rank: int) -> None:
    with belief() as te:
        model = te.Linear(8, 16, device="meta", parallel_mode="column")
    shard(model)
    di.materialize(model, "cpu", seed=0)
    assert model.weight.partition_dim == 0
    assert model.weight.tensor_model_parallel is not None
    with belief() as te:
        other = te.Linear(8, 16, device="meta")
    shard(other)
    other.weight.partition_dim = 7  # the user's word counts
    di.materialize(other, "cpu", seed=0)
    assert other.weight.partition_dim == 7


@te_needs("records of registered parameters")
def test_shards_carry_the_attributes_that_te_sets_when_it_makes_a_weight(
    ranks: Ranks,
) -> None:
    ranks(2).run(_parallel_attributes)


def _tracked(te: Any, device: str, tracker: Tracker) -> nn.Module:
    parallel = {"parallel_mode": "column", "tp_size": 2}
    return nn.Sequential(
        te.Linear(
            8, 16, get_rng_state_tracker=lambda: tracker, device=device, **parallel
        ),
        te.ops.BasicLinear(
            8, 8, rng_state_tracker_function=lambda: tracker, device=device
        ),
    )


def _from_trackers(rank: int, case: str) -> str:
    odd = rank if case == "differ" else 0
    trackers = (
        Tracker(**{_NAME: 7 + odd}),
        Tracker(**{_NAME: 7}),
    )
    with belief() as te:
        model = _tracked(te, "meta", trackers[0])
        torch.manual_seed(3)
        twin = _tracked(te, "cpu", trackers[1])
    shard(model)
    shard(twin)
    if case == "differ":
        with pytest.raises(di.PlanError) as caught:
            di.materialize(model, "cpu", seed=3)
        return str(caught.value)
    rng = "by_name" if case == "by name" else "eager"
    report = di.materialize(model, "cpu", seed=3, rng=rng)
    if case == "equal":
        assert_same(model, twin)
        assert torch.equal(*(t.states[_NAME] for t in trackers))
    return "; ".join(report.assumptions)


@te_needs("records of registered parameters")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("equal", ""),
        ("differ", "state of the random generators' tracker: "),
        ("by name", 'draws its part of 2 under rng="by_name", which gives'),
    ],
)
def test_tensor_parallel_parts_come_from_trackers_on_which_ranks_agree(
    ranks: Ranks, case: str, said: str
) -> None:
    for text in ranks(2).run(_from_trackers, case):
        assert said in text
        assert bool(said) == ("part of 2" in text or "tracker" in text)


def _biases(te: Any, device: str) -> Any:
    return te.ops.Sequential(*(te.ops.Bias(4, device=device) for _ in range(2)))


def _fusers(_rank: int) -> None:
    with belief() as te:
        model: Any = _biases(te, "meta")
        early = te.ops.fuser.OperationFuser(list(model))
    model._module_groups = model._make_module_groups(model._modules.values())
    shard(model)
    di.materialize(model, "cpu", seed=0, strict=False)
    assert model._module_groups is None
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for expected in (2.0, 1.5):
        out = model(torch.zeros(2, 4))
        assert torch.equal(out, torch.full((2, 4), expected))
        out.mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (fuser,) = model._module_groups
    assert not any(hasattr(p, "device_mesh") for p in fuser._flat_basic_op_params)
    assert not di.audit(model).findings

    sharded = type(fuser)(list(model))  # while the modules hold shards
    model._module_groups = [sharded]
    (finding,) = di.audit(model).findings
    assert finding.code == "te-fuser-stale"
    assert "found 2 other(s), shards, which FSDP2 replaces" in finding.message
    model._module_groups = [early]
    (finding,) = di.audit(model).findings
    assert finding.code == "te-fuser-stale"


def test_fusers_are_built_on_gathered_parameters_and_those_on_shards_are_found(
    ranks: Ranks,
) -> None:
    ranks(2).run(_fusers)

"""A fault at any boundary leaves Transformer Engine's modules and fusers as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import nn

import deferred_init as di
from tests.reliability.faults import Job, check_every_boundary, held_by
from tests.reliability.portrait import seed

pytestmark = pytest.mark.te


def _ops(te: Any) -> nn.Module:
    return te.ops.Sequential(
        te.ops.RMSNorm(4, device="meta"),
        te.ops.BasicLinear(4, 4, device="meta"),
        te.ops.Bias(4, device="meta"),
        te.ops.Linear(4, 4, device="meta"),
    )


def _grouped(te: Any) -> nn.Module:
    """Its weights are replaced by one, which optimizers and holders have to learn."""
    return te.ops.Sequential(
        te.ops.GroupedLinear(2, 4, 4, device="meta", single_grouped_weight=True)
    )


def _modules(te: Any) -> nn.Module:
    return nn.Sequential(
        te.LayerNormMLP(4, 8, device="meta"),
        te.LayerNormLinear(4, 4, device="meta"),
        te.Linear(4, 4, device="meta"),
        te.LayerNorm(4, device="meta"),
    )


def _recorded(te: Any) -> nn.Module:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), te.Linear(4, 4), nn.Linear(4, 2))

    return di.deferred_init(make)


def _job(model: nn.Module) -> Job:
    optimizer = torch.optim.AdamW(model.parameters())
    fusers = []
    for index, module in enumerate(model.modules()):
        if hasattr(module, "_make_module_groups"):
            module._module_groups = module._make_module_groups(module._modules.values())
            fusers += [g for g in module._module_groups if hasattr(g, "_basic_ops")]
        if hasattr(module, "name"):
            module.name = f"layer {index}"  # TE numbers all layers of a process
        if "_fp8_workspaces" in vars(module):
            module._fp8_workspaces[f"weight{index}"] = torch.ones(2)
    for fuser in fusers:
        fuser.recipe_type = type(None)
        if hasattr(fuser, "_fused_ops_cache"):
            fuser._fused_ops_cache["key"] = ([], [])
    holders = [dict(model.named_parameters()), *fusers]

    def run() -> None:
        di.materialize(
            model, "cpu", optimizers=optimizer, holders=holders, verify="full"
        )

    def held() -> list[Any]:
        caches = [
            (m.__dict__.get("_module_groups"), m.__dict__.get("_fp8_workspaces"))
            for m in model.modules()
        ]
        inside = [{**vars(fuser), "_basic_ops": None} for fuser in fusers]
        return [model, held_by([optimizer]), holders[0], inside, caches]

    return Job(run=run, held=held)


@pytest.mark.parametrize(
    "make",
    [
        _ops,
        pytest.param(_grouped, marks=te_needs("ops.GroupedLinear")),
        _modules,
        _recorded,
    ],
)
def test_a_fault_at_any_boundary_is_undone(
    te: Any, make: Callable[[Any], nn.Module]
) -> None:
    def job() -> Job:
        seed(3)
        return _job(make(te))

    crossed = check_every_boundary(job)
    assert "after FuserRefresher" in crossed
    assert len(crossed) > 15

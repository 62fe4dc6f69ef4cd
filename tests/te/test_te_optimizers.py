"""Transformer Engine's own optimizers, built before their parameters have memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import has, te_needs
from torch import nn
from torch.overrides import TorchFunctionMode

import deferred_init as di

pytestmark = pytest.mark.te


class _CudaToCpu(TorchFunctionMode):
    """Their constructors allocate a flag on the GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _model(te: Any) -> nn.Module:
    model = nn.Sequential(
        te.Linear(8, 8, device="meta"), te.ops.Linear(8, 8, device="meta")
    )
    if has("ops.GroupedLinear"):
        joined = {"single_grouped_weight": True}
        model.append(te.ops.GroupedLinear(2, 8, 8, device="meta", **joined))
    return model


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_they_hold_the_parameters_of_the_model_afterwards(te: Any, name: str) -> None:
    model = _model(te)
    with _CudaToCpu():
        optimizer = getattr(te.optimizers, name)(model.parameters(), lr=0.1)
    assert di.materialize(model, "cpu", seed=0, optimizers=[optimizer]).ok
    held = optimizer.param_groups[0]["params"]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    assert not any(p.is_meta for p in held)
    assert torch.equal(optimizer._dummy_overflow_buf, torch.tensor([0]).int())


def test_a_learning_rate_that_the_constructor_sent_to_meta_gets_its_value_back(
    te: Any,
) -> None:
    model = _model(te)
    with _CudaToCpu():
        optimizer = te.optimizers.FusedAdam(
            model.parameters(), lr=0.25, capturable=True
        )
    assert optimizer.param_groups[0]["lr"].is_meta
    report = di.materialize(model, "cpu", seed=0, optimizers=[optimizer])
    assert report.ok
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)
    assert any("FusedAdam's 'lr', of its defaults" in text for text in report.notes)


@te_needs("ops.GroupedLinear")
def test_without_being_told_of_it_the_audit_finds_what_it_holds(te: Any) -> None:
    model = _model(te)
    with _CudaToCpu():
        optimizer = te.optimizers.FusedAdam(
            model.parameters(), lr=0.25, capturable=True
        )
    di.materialize(model, "cpu", seed=0)
    found = di.audit(model, optimizers=[optimizer]).findings
    places = {f.fqn.removeprefix("optimizers[0].") for f in found}
    # The weights that became one, and the learning rate.
    assert places == {
        "param_groups[0]['lr']",
        "param_groups[0][4]",
        "param_groups[0][5]",
    }


def test_other_tensors_that_a_constructor_made_without_memory_are_refused(
    te: Any,
) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.scale = torch.ones(1, device=self.param_groups[0]["params"][0].device)

    model = te.Linear(8, 8, device="meta")
    with pytest.raises(
        di.PlanError, match=r"\(Own\) has 1 attributes without memory \(\['scale'\]\)"
    ):
        di.materialize(model, "cpu", optimizers=[Own(model.parameters())])

"""A release whose fuser tracks the versions of parameters itself.

As NVIDIA/TransformerEngine's pull request 3327 has it: ops count registrations, and a
fuser makes its lists anew when the count has changed, after the hooks of the first
forward and before it looks where the backward begins. Both forward and backward run.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.handlers.ecosystems import load_handlers

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TE")
from fusible_ops import build, step, train  # noqa: E402 - imports TE
from te_equality import same_tensors  # noqa: E402
from transformer_engine.pytorch.ops.op import BasicOperation  # noqa: E402

pytestmark = pytest.mark.te
OPS = "transformer_engine.pytorch.ops"


class _Tracking(te.ops.fuser.OperationFuser):
    """A fuser that caches parameters when their version changes."""

    num_cached = 0

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        for name in ("_basic_op_params", "_basic_op_num_params"):
            setattr(self, name, [])
        self._flat_basic_op_params = []
        self._param_version = -1

    def _cache_parameters(self) -> None:
        self._basic_op_params = [list(op.parameters()) for op in self._basic_ops]
        self._basic_op_num_params = [len(each) for each in self._basic_op_params]
        self._flat_basic_op_params = [p for each in self._basic_op_params for p in each]
        type(self).num_cached += 1

    def maybe_fuse_ops(self, *args: Any) -> None:
        if self.recipe_type is None:
            for op in self._basic_ops:
                op.reset_recipe_state(recipe=args[1])
                op.pre_first_fuser_forward()
        version = sum(op.param_version for op in self._basic_ops)
        if version != self._param_version:
            self._param_version = version
            self._cache_parameters()
            self._fused_ops_cache = {}
        super().maybe_fuse_ops(*args)


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ops count, and everybody build fusers that look at the count."""

    cls: Any = BasicOperation

    def register_parameter(self: Any, name: str, param: Any) -> None:
        super(cls, self).register_parameter(name, param)
        vars(self)["param_version"] = getattr(self, "param_version", 0) + 1

    monkeypatch.setattr(cls, "register_parameter", register_parameter, raising=False)
    monkeypatch.setattr(cls, "param_version", 0, raising=False)
    load_handlers()  # they are for the release as it is
    for name in ("sequential", "fuser"):
        module = importlib.import_module(f"{OPS}.{name}")
        monkeypatch.setattr(module, "OperationFuser", _Tracking)
    _Tracking.num_cached = 0


def _twin() -> Any:
    torch.manual_seed(0)
    return build("cpu")


def test_such_a_release_trains_without_materialize() -> None:
    torch.manual_seed(0)
    model = build("meta")
    step(model, 0)
    assert _Tracking.num_cached == 1
    assert torch.equal(model[1].weight, _twin()[1].weight)


@pytest.mark.parametrize("state", ["fresh", "fuser built", "first step ran"])
def test_it_comes_out_the_same(state: str) -> None:
    model = build("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held = [id(param) for param in model.parameters()]
    ran = state == "first step ran"
    if state == "fuser built":
        model._module_groups = model._make_module_groups(model._modules.values())
        assert type(model._module_groups[0]) is _Tracking
    if ran:  # well, but with new objects, which this optimizer has never seen
        torch.manual_seed(0)
        step(model, 7)
        assert [id(param) for param in model.parameters()] != held
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        held = [id(param) for param in model.parameters()]
    report = di.materialize(
        model, "cpu", optimizers=[optimizer], seed=None if ran else 0, verify="full"
    )
    assert report.ok
    assert [id(param) for param in model.parameters()] == held
    twin = _twin()
    assert same_tensors(train(model, optimizer), train(twin))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert di.audit(model, optimizers=[optimizer], verify="full").ok


def test_a_fuser_that_somebody_holds_makes_its_lists_anew() -> None:
    ops = build("meta", make=lambda *ops: nn.ModuleList(ops))
    fuser = _Tracking(list(ops))
    di.materialize(ops, "cpu", seed=0, holders=[fuser])
    x = torch.ones(2, 8)
    out = fuser(x)
    assert torch.equal(out, _twin()(x))
    out.sum().backward()
    assert all(param.grad is not None for param in ops.parameters())
    assert [id(p) for p in fuser._flat_basic_op_params] == [
        id(p) for p in ops.parameters()
    ]


def test_without_materialize_objects_flags_and_attributes_are_lost() -> None:
    """What such a release leaves to do."""
    model = build("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight = model[1].weight
    weight.requires_grad_(False)
    weight.mine = "kept"
    step(model, 0)
    assert model[1].weight.requires_grad
    assert not hasattr(model[1].weight, "mine")
    assert all(p.is_meta for p in optimizer.param_groups[0]["params"])

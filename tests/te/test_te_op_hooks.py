"""What the hooks of `te.ops`, which make parameters on a GPU, are lent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.workspace import ExecutionWorkspace

pytest.importorskip("transformer_engine.pytorch", reason="needs TE")
from deferred_init.handlers.te_ops import _can_be_lent, _run_hook

pytestmark = pytest.mark.te
KINDS = ("BasicLinear", "Bias", "LayerNorm", "RMSNorm")


def _op(te: Any, kind: str, device: str) -> Any:
    sizes = (8, 16) if kind == "BasicLinear" else (8,)
    return getattr(te.ops, kind)(*sizes, device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_finds_memory_and_fills_it_as_the_constructor_does(
    te: Any, kind: str
) -> None:
    op = _op(te, kind, "meta")
    before = dict(op.named_parameters())
    the_plan = di.plan(op, "cpu", seed=0)
    workspace = ExecutionWorkspace(the_plan.inventory, the_plan.request)
    if kind == "Bias":
        op.device = torch.device("cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for step in the_plan.steps:
            _run_hook(step, workspace)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = _op(te, kind, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    for name, param in op.named_parameters():
        expected = twin.get_parameter(name)
        assert param is before[name]
        assert torch.equal(param, expected)
        assert param.requires_grad == expected.requires_grad


def test_a_hook_of_a_subclass_finds_meta_as_in_its_first_forward(te: Any) -> None:
    class Own(te.ops.BasicLinear):  # type: ignore[name-defined,misc]
        found = ""

        def pre_first_fuser_forward(self) -> None:
            type(self).found = self.weight.device.type
            self.weight = nn.Parameter(torch.ones(self.weight.shape))

    op = Own(4, 4, device="meta")
    the_plan = di.plan(op, "cpu", seed=0)
    workspace = ExecutionWorkspace(the_plan.inventory, the_plan.request)
    assert not _can_be_lent(op, list(the_plan.inventory.slots))
    _run_hook(the_plan.steps[0], workspace)
    assert Own.found == "meta"
    assert bool((op.weight == 1).all())


def test_a_grouped_op_makes_its_own_block_and_is_lent_none(te: Any) -> None:
    if not hasattr(te.ops, "GroupedLinear"):
        pytest.skip("this release has no grouped op")
    op = te.ops.GroupedLinear(2, 8, 8, device="meta")
    slots = list(di.plan(op, "cpu", seed=0).inventory.slots)
    assert slots
    assert not _can_be_lent(op, slots)

"""Transformer Engine's fuser at work, forward and backward, on a CPU.

The failures of plain Transformer Engine are tested too: a test of what is mended is
worth something only while it fails without the mending.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di

pytest.importorskip("transformer_engine.pytorch", reason="needs TE")
from fusible_ops import build, step, train
from te_equality import same_tensors

pytestmark = pytest.mark.te


def _same_parameters(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _twin(**options: Any) -> Any:
    torch.manual_seed(0)
    return build("cpu", **options)


def test_every_backward_of_a_sequential_on_meta_fails_without_materialize() -> None:
    model = build("meta")
    for number in range(2):
        with pytest.raises(RuntimeError, match="expected device meta but got cpu"):
            step(model, number)
    assert not any(param.is_meta for param in model.parameters())


def test_the_first_backward_of_a_single_op_fails_without_materialize() -> None:
    op = build("meta")[1]
    with pytest.raises(RuntimeError, match="expected device meta but got cpu"):
        step(op, 0)
    step(op, 1)  # by a new fuser


@pytest.mark.parametrize("state", ["fresh", "fuser built", "first step failed"])
def test_a_model_on_meta_trains_as_if_built_with_memory(state: str) -> None:
    model = build("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held = list(model.parameters())
    failed = state == "first step failed"
    if state == "fuser built":
        model._module_groups = model._make_module_groups(model._modules.values())
    if failed:
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="meta"):
            step(model, 7)
    di.materialize(
        model,
        "cpu",
        optimizers=[optimizer],
        seed=None if failed else 0,
        verify="full",
    )
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    twin = _twin()
    assert _same_parameters(model, twin)
    assert same_tensors(train(model, optimizer), train(twin))
    assert _same_parameters(model, twin)


def test_a_fuser_that_somebody_keeps_runs_and_trains(te: Any) -> None:
    ops = build("meta", make=lambda *ops: nn.ModuleList(ops))
    fuser = te.ops.fuser.OperationFuser(list(ops))
    model = _Kept(ops, fuser)
    di.materialize(ops, "cpu", seed=0, holders=[lambda x: fuser(x)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert same_tensors(train(model), train(_twin()))


class _Kept:
    """A model whose owner calls the fuser himself."""

    def __init__(self, ops: Any, fuser: Any) -> None:
        self.parameters, self.fuser = ops.parameters, fuser

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self.fuser(x)
        return found


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1, 2), (0, 1, 2)])
def test_frozen_ops_get_no_gradient_and_the_backward_stops_where_it_does_in_eager(
    frozen: tuple[int, ...],
) -> None:
    model, twin = build("meta"), _twin()
    for each in (model, twin):
        for index, param in enumerate(each.parameters()):
            param.requires_grad_(index not in frozen)
    model._module_groups = model._make_module_groups(model._modules.values())
    di.materialize(model, "cpu", seed=0)
    if len(frozen) == 3:
        for each in (model, twin):
            assert not each(torch.ones(1, 8)).requires_grad
        return
    assert same_tensors(train(model), train(twin))
    places = [
        each._module_groups[0].first_op_requiring_backward for each in (model, twin)
    ]
    assert places[0] == places[1] == min({0, 1, 2} - set(frozen))
    assert [p.grad is None for p in model.parameters()] == [
        i in frozen for i in range(3)
    ]


def test_without_materialize_frozen_ops_thaw() -> None:
    model = build("meta")
    for param in model.parameters():
        param.requires_grad_(False)
    model(torch.ones(1, 8))
    assert all(param.requires_grad for param in model.parameters())


def test_a_fuser_of_an_op_held_by_a_user_s_module_is_transient() -> None:
    class Block(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.first, self.product, self.last = build(device)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.product(self.first(x)))

    model = Block("meta")
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    twin = Block("cpu")
    assert same_tensors(train(model), train(twin))


def test_a_lazy_materialization_trains_too() -> None:
    from deferred_init.lazy import materialize_on_first_forward

    model = build("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = materialize_on_first_forward(model, "cpu", optimizers=[optimizer], seed=0)
    assert same_tensors(train(model, optimizer), train(_twin()))
    assert not handle.pending


def test_an_op_of_somebody_else_is_drawn_once() -> None:
    """By its own method, which the search for init methods finds as well."""
    model = build("meta")
    plan = di.plan(model, "cpu")
    assert [len(step.claim.slots) for step in plan.steps] == [1, 1, 1]
    weight = model[1].weight
    di.materialize(model, "cpu", seed=0)
    state = torch.get_rng_state()
    twin = _twin()
    assert torch.equal(torch.get_rng_state(), state)
    assert model[1].weight is weight
    assert torch.equal(weight, twin[1].weight)


def test_nothing_is_replaced_or_moved_after_materialization() -> None:
    """A captured CUDA graph reads and writes the memory that was there."""
    model = build("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    di.materialize(model, "cpu", optimizers=[optimizer], seed=0)
    before = [(id(param), param.data_ptr()) for param in model.parameters()]
    train(model, optimizer)
    assert di.materialize(model, "cpu", optimizers=[optimizer]).ok
    assert di.audit(model, optimizers=[optimizer], verify="full").ok
    train(model, optimizer)
    after = [(id(param), param.data_ptr()) for param in model.parameters()]
    assert after == before

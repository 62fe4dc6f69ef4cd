"""Grouped layers that join their parameters, and other traps on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from te_models import (
    BF16,
    RECIPES,
    ROWS,
    WIDTH,
    assert_same_parameters,
    outcome,
    train,
)
from torch import nn
from torch.optim import AdamW

import deferred_init as di

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.te]


def _grouped(kind: str, device: str, weight: bool, bias: bool) -> nn.Module:
    joined = {"single_grouped_weight": weight, "single_grouped_bias": bias}
    if kind == "module":
        return te.GroupedLinear(
            2, WIDTH, WIDTH, device=device, params_dtype=BF16, **joined
        )
    return te.ops.Sequential(
        te.ops.GroupedLinear(2, WIDTH, WIDTH, device=device, dtype=BF16, **joined)
    )


@pytest.mark.parametrize(
    ("weight", "bias"), [(True, False), (True, True), (False, True)]
)
@pytest.mark.parametrize("kind", ["module", "op"])
def test_joined_parameters_are_made_and_optimizers_follow(
    kind: str, weight: bool, bias: bool
) -> None:
    model = _grouped(kind, "meta", weight, bias)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if kind == "op":
        model._module_groups = model._make_module_groups(model._modules.values())
    report = di.materialize(model, "cuda", optimizers=[optimizer], seed=0)
    assert report.ok
    torch.manual_seed(0)
    twin = _grouped(kind, "cuda", weight, bias)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_same_parameters(model, twin)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    # Where this cuBLAS is too old for joined parameters, TE refuses both alike.
    other = AdamW(twin.parameters(), lr=1e-2)
    assert outcome(model, optimizer, None) == outcome(twin, other, None)
    assert_same_parameters(model, twin)


def test_a_fuser_held_in_a_closure_is_put_right() -> None:
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    ops = [
        te.ops.BasicLinear(WIDTH, WIDTH, device="meta", dtype=BF16),
        te.ops.GroupedLinear(
            2, WIDTH, WIDTH, device="meta", dtype=BF16, single_grouped_weight=True
        ),
    ]
    model = nn.ModuleList(ops)
    fuser = OperationFuser(ops)

    def step(x: torch.Tensor) -> torch.Tensor:
        splits = torch.tensor([ROWS // 2] * 2, device="cuda")
        return fuser(x, splits)

    holder = functools.partial(step)
    report = di.materialize(model, "cuda", holders=[holder], seed=0)
    assert report.ok
    actual = [param for op in ops for param in op.parameters()]
    held = fuser._flat_basic_op_params
    assert [id(p) for p in held] == [id(p) for p in actual]


def test_an_op_of_somebody_else_makes_its_parameters_by_its_own_hook() -> None:
    from transformer_engine.pytorch.ops.op import BasicOperation

    class Scale(BasicOperation):
        def __init__(self, size: int, device: str) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(size, device=device, dtype=BF16))
            if device != "meta":
                self.reset_parameters()

        def reset_parameters(self) -> None:
            made = torch.rand(self.scale.shape, device="cuda", dtype=BF16)
            self.scale = nn.Parameter(made)

        def pre_first_fuser_forward(self) -> None:
            if self.scale.is_meta:
                self.reset_parameters()

        def op_forward(self, ctx: Any, x: Any, **kwargs: Any) -> Any:
            ctx.save_for_backward(x, self.scale)
            return x * self.scale

        def op_backward(self, ctx: Any, grad: Any) -> Any:
            x, scale = ctx.saved_tensors
            return grad * scale, [(grad * x).sum(0)]

    def make(device: str) -> nn.Module:
        linear = te.ops.Linear(WIDTH, WIDTH, device=device, dtype=BF16)
        return te.ops.Sequential(linear, Scale(WIDTH, device))

    model = make("meta")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    di.materialize(model, "cuda", optimizers=[optimizer], seed=0)
    state = torch.cuda.get_rng_state()
    torch.manual_seed(0)
    twin = make("cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert_same_parameters(model, twin)
    outputs = train(model, optimizer, None)
    expected = train(twin, AdamW(twin.parameters(), lr=1e-2), None)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_model_is_made_by_its_first_forward(recipe: str) -> None:
    from deferred_init.lazy import materialize_on_first_forward

    te_recipe = RECIPES[recipe]()
    preset = None if te_recipe is None else "fp8_current"

    def make(device: str) -> nn.Module:
        return te.ops.Sequential(
            te.ops.LayerNorm(WIDTH, device=device, dtype=BF16),
            te.ops.Linear(WIDTH, WIDTH, device=device, dtype=BF16),
        )

    model = make("meta")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    handle = materialize_on_first_forward(
        model, "cuda", preset, optimizers=[optimizer], seed=0
    )
    outputs = train(model, optimizer, te_recipe)
    assert not handle.pending
    assert handle.report is not None
    twin = make("meta")
    other = AdamW(twin.parameters(), lr=1e-2)
    di.materialize(twin, "cuda", preset, optimizers=[other], seed=0)
    expected = train(twin, other, te_recipe)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_delayed_weight_gradients_keep_their_mark() -> None:
    model = te.Linear(
        WIDTH, WIDTH, device="meta", params_dtype=BF16, delay_wgrad_compute=True
    )
    di.materialize(model, "cuda", "fp8_current", seed=0)
    assert model.weight.skip_backward_post_hook is True
    assert model.weight.tensor_model_parallel is True


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_are_made_on_the_device_asked_for() -> None:
    model = te.ops.Linear(WIDTH, WIDTH, device="meta", dtype=BF16)
    assert torch.cuda.current_device() == 0
    di.materialize(model, "cuda:1", seed=0)
    assert {p.device for p in model.parameters()} == {torch.device("cuda:1")}
    assert model.basic_ops[1].device == torch.device("cuda:1")

"""`te.ops` on a CPU: values, identity, aliases, hooks of other people's ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import has, te_needs
from te_equality import assert_same_parameters
from torch import Tensor, nn

import deferred_init as di

pytestmark = pytest.mark.te


def _stack(te: Any, device: str) -> nn.Module:
    ops = te.ops
    grouped = has("ops.GroupedLinear")
    return ops.Sequential(
        ops.LayerNorm(8, device=device, zero_centered_gamma=True),
        ops.BasicLinear(8, 16, device=device),
        ops.Bias(16, device=device),
        ops.Sequential(
            ops.RMSNorm(16, device=device), ops.Linear(16, 8, device=device)
        ),
        *((ops.GroupedLinear(2, 8, 8, device=device),) if grouped else ()),
        te.LayerNorm(8, device=device),
        te.RMSNorm(8, device=device, sequence_parallel=True),
    )


def test_every_op_equals_eager_and_leaves_the_generator_as_eager_does(te: Any) -> None:
    model = _stack(te, "meta")
    di.materialize(model, "cpu", seed=0, verify="full")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = _stack(te, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_parameters(model, twin)


def test_objects_flags_attributes_and_hooks_stay(te: Any) -> None:
    model = _stack(te, "meta")
    before = dict(model.named_parameters())
    weight = model[1].weight
    weight.requires_grad_(False)
    weight.mine = "kept"
    model[2].bias.register_hook(lambda grad: grad * 2)
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", seed=0, optimizers=[optimizer])
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in before.items())
    assert not weight.requires_grad
    assert weight.mine == "kept"
    model[2].bias.sum().backward()
    assert bool((model[2].bias.grad == 2).all())


def test_ops_in_plain_lists_and_inside_fused_ops_are_found(te: Any) -> None:
    class Holder(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.ops = [te.ops.BasicLinear(4, 4, device=device)]
            self.linear = te.ops.Linear(4, 4, device=device)

    model = Holder("meta")
    di.materialize(model, "cpu", seed=1)
    torch.manual_seed(1)
    twin = Holder("cpu")
    # Hidden modules come after registered ones in the walk, not as constructed.
    assert not model.ops[0].weight.is_meta
    assert model.linear.weight is model.linear.basic_ops[0].weight
    assert model.linear.weight.shape == twin.linear.weight.shape


def test_aliases_that_came_apart_are_one_object_again(te: Any) -> None:
    linear = te.ops.Linear(4, 4, device="meta")
    for name, param in list(linear._parameters.items()):  # what `to_empty` can do
        linear._parameters[name] = nn.Parameter(torch.empty_like(param))
    assert linear.weight is not linear.basic_ops[0].weight
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    report = di.materialize(linear, "cpu", seed=0, optimizers=[optimizer])
    assert report.ok
    assert linear.weight is linear.basic_ops[0].weight
    assert linear.bias is linear.basic_ops[1].bias
    held = optimizer.param_groups[0]["params"]
    assert [id(p) for p in held] == [id(linear.weight), id(linear.bias)]


def test_an_alias_left_on_meta_by_a_failed_first_step_takes_the_contents(
    te: Any,
) -> None:
    linear = te.ops.Linear(4, 4, device="meta")
    old = linear.weight
    old.requires_grad_(False)
    made = nn.Parameter(torch.ones(4, 4))
    linear.basic_ops[0].weight = made  # what the hook does inside the first forward
    assert linear.weight is old
    di.materialize(linear, "cpu", seed=0)
    assert linear.weight is old is linear.basic_ops[0].weight
    assert torch.equal(old, torch.ones(4, 4))
    assert not old.requires_grad


def test_an_alias_with_values_wins_over_a_basic_parameter_without(te: Any) -> None:
    linear = te.ops.Linear(4, 4, device="meta")
    loaded = nn.Parameter(torch.ones(4, 4))
    linear._parameters["weight"] = loaded
    di.materialize(linear, "cpu", seed=0)
    assert linear.weight is loaded is linear.basic_ops[0].weight
    assert torch.equal(loaded, torch.ones(4, 4))


@te_needs("ops.FusedOperation")
def test_a_fused_op_of_somebody_else_with_aliases_works(te: Any) -> None:
    class Both(te.ops.FusedOperation):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(
                [
                    te.ops.BasicLinear(4, 4, device="meta"),
                    te.ops.Bias(4, device="meta"),
                ]
            )
            self.matrix = self.basic_ops[0].weight
            self.register_parameter("bias", self.basic_ops[1].bias)

    fused = Both()
    di.materialize(fused, "cpu", seed=0)
    assert fused.matrix is fused.basic_ops[0].weight
    assert fused.bias is fused.basic_ops[1].bias
    assert not fused.matrix.is_meta


def test_an_op_of_somebody_else_makes_its_tensors_by_its_own_hook(te: Any) -> None:
    class Scale(te.ops.op.BasicOperation):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, device="meta"))

        def pre_first_fuser_forward(self) -> None:
            if self.scale.is_meta:
                self.scale = nn.Parameter(torch.full((4,), 5.0))

        def op_forward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

        def op_backward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

    model = te.ops.Sequential(Scale())
    scale = model[0].scale
    di.materialize(model, "cpu")
    assert model[0].scale is scale
    assert torch.equal(scale, torch.full((4,), 5.0))


def test_a_hook_that_leaves_a_parameter_without_memory_is_an_error(te: Any) -> None:
    class Lazy(te.ops.op.BasicOperation):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, device="meta"))

        def pre_first_fuser_forward(self) -> None:
            self.called = True

        def op_forward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

        def op_backward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

    op = Lazy()
    with pytest.raises(
        di.MaterializeError, match="the hook of Lazy left `scale` without memory"
    ):
        di.materialize(op, "cpu")
    assert op.scale.is_meta
    assert not hasattr(op, "called")


def test_an_op_without_any_hook_is_listed_as_unclaimed(te: Any) -> None:
    class Silent(te.ops.op.BasicOperation):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, device="meta"))

        def op_forward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

        def op_backward(self, *args: Any, **kwargs: Any) -> Tensor:
            raise NotImplementedError

    with pytest.raises(di.PlanError, match=r"`scale` \(parameter of `Silent`\)"):
        di.materialize(Silent(), "cpu")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_partly_loaded_norm_keeps_its_real_tensor(te: Any, name: str) -> None:
    norm = te.ops.LayerNorm(4, device="meta")
    loaded = nn.Parameter(torch.full((4,), 3.0))
    setattr(norm, name, loaded)
    di.materialize(norm, "cpu")
    assert getattr(norm, name) is loaded
    assert torch.equal(loaded, torch.full((4,), 3.0))


def test_tied_ops_stay_tied_and_draw_as_in_eager(te: Any) -> None:
    def make(device: str) -> nn.Module:
        first = te.ops.BasicLinear(4, 4, device=device)
        second = te.ops.BasicLinear(4, 4, device=device)
        second.weight = first.weight
        return te.ops.Sequential(first, second, te.ops.BasicLinear(4, 4, device=device))

    model = make("meta")
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    assert_same_parameters(model, make("cpu"))
    assert model[0].weight is model[1].weight


def test_bias_follows_the_device_asked_for(te: Any) -> None:
    bias = te.ops.Bias(4, device="meta")
    assert bias.device.type == "cuda"
    di.materialize(bias, "cpu")
    assert bias.device == torch.device("cpu")
    assert bias.bias.device.type == "cpu"


def test_everything_is_put_back_if_a_later_step_fails(te: Any) -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            raise ValueError("on purpose")

    with torch.device("meta"):
        with pytest.raises(ValueError, match="on purpose"):
            Broken(2, 2)
        last = nn.Linear(2, 2)
    last.__class__ = Broken
    model = nn.ModuleList([_stack(te, "meta"), last])
    bias = model[0][2]
    before = {name: id(param) for name, param in model.named_parameters()}
    model[0]._module_groups = groups = model[0]._make_module_groups(
        model[0]._modules.values()
    )
    fuser = next(group for group in groups if hasattr(group, "_basic_ops"))
    held = fuser._flat_basic_op_params
    with pytest.raises(di.DeferredInitError):
        di.materialize(model, "cpu")
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert all(param.is_meta for param in model.parameters())
    assert bias.device.type == "cuda"
    assert model[0]._module_groups is groups
    assert fuser._flat_basic_op_params is held

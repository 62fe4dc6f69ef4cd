"""Transformer Engine's own init on fake CUDA tensors, beside what `materialize` makes.

`FakeTensorMode` runs `reset_parameters` as on a GPU, without one. The linear ops draw
with an operation that has no fake form on CUDA; they run for real on a CPU instead, see
`test_te_ops.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from te_kinds import MODULES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = [pytest.mark.te, te_needs("fake CUDA tensors")]
KINDS = [
    kind
    for kind in MODULES
    if kind not in ("ops.BasicLinear", "ops.Linear", "ops.GroupedLinear")
]
MARKS = (
    *("tensor_model_parallel", "partition_dim", "partition_stride"),
    *("sequence_parallel", "skip_backward_post_hook"),
)
RANDOM = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")


class _Draws(TorchDispatchMode):
    """Lists the random operations, each with the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in RANDOM:
            self.seen.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


def _build(te: Any, kind: str) -> nn.Module:
    with on_meta():
        return MODULES[kind](te)


def _dry_run(model: nn.Module) -> list[tuple[str, int]]:
    """Call every `reset_parameters`, children first, on fake CUDA tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Draws() as draws:
        for module in reversed(list(model.modules())):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return draws.seen


def _form(param: Tensor) -> tuple[Any, ...]:
    return param.shape, param.stride(), param.dtype


def _marks(param: Tensor) -> dict[str, Any]:
    return {name: getattr(param, name) for name in MARKS if hasattr(param, name)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_materialized_has_the_form_of_what_te_makes_on_a_gpu(
    te: Any, kind: str
) -> None:
    dry, model = _build(te, kind), _build(te, kind)
    _dry_run(dry)
    di.materialize(model, "cpu", seed=0)
    made, fakes = dict(model.named_parameters()), dict(dry.named_parameters())
    assert list(made) == list(fakes)
    for name, fake in fakes.items():
        assert isinstance(fake, FakeTensor), name
        assert fake.device == torch.device("cuda", 0), name
        assert _form(made[name]) == _form(fake), name
        assert _marks(made[name]) == _marks(fake), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_materialized_draws_what_te_draws_on_a_gpu(te: Any, kind: str) -> None:
    expected = _dry_run(_build(te, kind))
    model = _build(te, kind)
    with _Draws() as draws:
        di.materialize(model, "cpu", seed=0)
    wrong = [("normal_", 2)] if "DotProductAttention" in _names(model) else []
    # TE's constructor of attention draws nothing; its `reset_parameters` does.
    assert sorted(draws.seen + wrong) == sorted(expected)


def _names(model: nn.Module) -> set[str]:
    learnable = (
        m for m in model.modules() if getattr(m, "softmax_offset", None) is not None
    )
    return {type(module).__name__ for module in learnable}


@pytest.mark.parametrize("kind", KINDS)
def test_reset_parameters_loses_objects_flags_attributes_and_hooks(
    te: Any, kind: str
) -> None:
    """Which `materialize` keeps: see `test_te_carry_over.py`."""
    model = _build(te, kind)
    before = dict(model.named_parameters())
    for param in before.values():
        param.register_hook(lambda grad: grad)
        param.mine = "kept"
        param.requires_grad_(False)
    _dry_run(model)
    for name, param in model.named_parameters():
        assert param is not before[name], name
        assert param.requires_grad, name
        assert not hasattr(param, "mine"), name
        assert not param._backward_hooks, name


def test_reset_parameters_makes_the_loaded_ones_again(te: Any) -> None:
    model = te.Linear(8, 8, device="meta")
    model.bias = loaded = nn.Parameter(torch.ones(8))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model.bias = nn.Parameter(mode.from_tensor(loaded.detach()))
        kept = model.bias
        model.reset_parameters()
    assert model.bias is not kept


def test_a_mark_of_delayed_weight_gradients_is_lost_by_reset_parameters(
    te: Any,
) -> None:
    model = te.Linear(8, 8, device="meta", delay_wgrad_compute=True)
    assert model.weight.skip_backward_post_hook
    _dry_run(model)
    assert not hasattr(model.weight, "skip_backward_post_hook")


def test_what_a_dry_run_leaves_behind_is_found_and_refused_by_name(te: Any) -> None:
    model = _build(te, "LayerNormMLP")
    _dry_run(model)
    assert {f.code for f in di.audit(model).findings} == {"deferred-tensor"}
    with pytest.raises(di.PlanError, match=r"`fc2_bias` .* is a `FakeTensor`"):
        di.materialize(model, "cpu")

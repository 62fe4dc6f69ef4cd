"""Grouped layers: one block of memory, joined parameters, what TE refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import Tensor, nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = pytest.mark.te


def _make(te: Any, kind: str, device: str, **options: Any) -> Any:
    cls = te.GroupedLinear if kind == "module" else te.ops.GroupedLinear
    return cls(3, 8, 8, device=device, **options)


def _memory(model: nn.Module) -> list[tuple[str, int, int, int]]:
    """Name, storage as a number, its size and the offset of each parameter."""
    storages: dict[int, int] = {}
    found = []
    for name, param in model.named_parameters():
        storage = param.untyped_storage()
        number = storages.setdefault(storage.data_ptr(), len(storages))
        found.append((name, number, storage.nbytes(), param.storage_offset()))
    return found


@pytest.mark.parametrize(
    "kind", ["module", pytest.param("op", marks=te_needs("ops.GroupedLinear"))]
)
def test_experts_lie_in_memory_as_in_eager(te: Any, kind: str) -> None:
    """The op's kernels expect all of them in one block."""
    model = _make(te, kind, "meta")
    di.materialize(model, "cpu", seed=0)
    assert _memory(model) == _memory(_make(te, kind, "cpu"))
    assert len({number for _, number, _, _ in _memory(model)}) == (
        2 if kind == "op" else 6
    )


@te_needs("joined weights")
@pytest.mark.parametrize("joined", ["weight", "bias", "both"])
@pytest.mark.parametrize("kind", ["module", "op"])
def test_keys_of_the_state_dict_follow_and_a_second_call_changes_nothing(
    te: Any, kind: str, joined: str
) -> None:
    options = {
        f"single_grouped_{name}": joined in (name, "both")
        for name in ("weight", "bias")
    }
    model = _make(te, kind, "meta", **options)
    di.materialize(model, "cpu", seed=0)
    assert list(model.state_dict()) == list(
        _make(te, kind, "cpu", **options).state_dict()
    )
    held = dict(model.named_parameters())
    values = {name: _plain(param).clone() for name, param in held.items()}
    assert di.materialize(model, "cpu", seed=1).ok
    for name, param in model.named_parameters():
        assert param is held[name]
        assert torch.equal(_plain(param), values[name])


def _plain(param: Any) -> Tensor:
    data: Tensor = param.detach() if type(param) is nn.Parameter else param.rowwise_data
    return data


@te_needs("joined weights")
@pytest.mark.parametrize("kind", ["module", "op"])
def test_joined_parameters_are_frozen_if_all_of_their_parts_were(
    te: Any, kind: str
) -> None:
    model = _make(te, kind, "meta", single_grouped_weight=True)
    for index in range(3):
        getattr(model, f"weight{index}").requires_grad_(False)
    di.materialize(model, "cpu", seed=0)
    assert not model.weight.requires_grad
    assert model.bias0.requires_grad


@te_needs("joined weights")
@pytest.mark.parametrize("kind", ["module", "op"])
def test_joined_parameters_of_which_some_are_frozen_are_refused(
    te: Any, kind: str
) -> None:
    model = _make(te, kind, "meta", single_grouped_weight=True)
    model.weight1.requires_grad_(False)
    with pytest.raises(
        di.PlanError,
        match=r"joins 3 parameters into one `weight`, but 1 of them are frozen "
        r"\(weight1\)",
    ):
        di.plan(nn.Sequential(model), "cpu")


@te_needs("ops.GroupedLinear")
def test_an_op_with_frozen_weights_and_trainable_biases_is_as_te_refuses_it(
    te: Any,
) -> None:
    """Transformer Engine compares the flags in the first forward."""
    model, twin = (_make(te, "op", device) for device in ("meta", "cpu"))
    for each in (model, twin):
        for index in range(3):
            getattr(each, f"weight{index}").requires_grad_(False)
    di.materialize(model, "cpu", seed=0)
    assert [p.requires_grad for p in model.parameters()] == [False] * 3 + [True] * 3
    for each in (model, twin):
        with pytest.raises(RuntimeError, match="Bias 0 has requires_grad=True"):
            each.pre_first_fuser_forward()


@te_needs("ops.GroupedLinear")
def test_an_op_with_joined_weights_refuses_delayed_scaling_in_the_plan(te: Any) -> None:
    model = _make(te, "op", "meta", single_grouped_weight=True)
    with pytest.raises(di.PlanError, match="does not do with delayed scaling"):
        di.plan(model, "cuda", "fp8_delayed", gpu="h200")
    assert di.plan(model, "cuda", "bf16", gpu="h200").steps


@te_needs("joined weights")
def test_a_module_with_joined_weights_keeps_them_apart_for_delayed_scaling(
    te: Any,
) -> None:
    """Transformer Engine itself does not join them then."""
    from transformer_engine.common.recipe import DelayedScaling

    with on_meta(), te.quantized_model_init(recipe=DelayedScaling()):
        model = te.GroupedLinear(2, 32, 32, single_grouped_weight=True)
    stored = di.plan(model, "cuda", gpu="h200").forecast().tensors
    assert {"weight0", "weight1"} <= {each.fqn for each in stored}


@te_needs("ops.GroupedLinear")
@pytest.mark.parametrize("joined", [False, True])
def test_an_op_that_delays_weight_gradients_is_marked_as_in_eager(
    te: Any, joined: bool
) -> None:
    options = {"delay_wgrad_compute": True, "single_grouped_weight": joined}
    model, twin = (_make(te, "op", device, **options) for device in ("meta", "cpu"))
    di.materialize(model, "cpu", seed=0)
    marks = [
        {n for n, p in each.named_parameters() if hasattr(p, "skip_backward_post_hook")}
        for each in (model, twin)
    ]
    assert marks[0] == marks[1] != set()

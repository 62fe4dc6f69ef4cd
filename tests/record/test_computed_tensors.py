"""Tensors that a constructor computed from parameters, and what was written on the way.

A tensor with a gradient history is computed again from the real parameters, so that
gradients flow as in eager. Whatever was written in place, its bits are eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import deferred_init as di


def _layer() -> Any:
    return nn.Linear(4, 2)


def _masked() -> Any:
    model = _layer()
    mask = torch.ones_like(model.weight).clone()
    mask.view(-1)[model.weight.abs().view(-1).topk(2).indices] = 0
    model.result = mask * model.weight
    return model


def _copy_changed() -> Any:
    model = _layer()
    copy = model.weight.detach().clone()
    copy[0] = 0
    model.result = model.weight * copy
    return model


def _changed_without_gradient() -> Any:
    model = _layer()
    with torch.no_grad():
        copy = model.weight.clone()
        copy.mul_(2)
    model.result = model.weight * copy
    return model


def _changed_itself() -> Any:
    model = _layer()
    model.result = model.weight * 2
    model.result.mul_(3)
    return model


def _changed_through_a_view() -> Any:
    model = _layer()
    double = model.weight * 2
    model.result = double.view(-1)
    double.mul_(3)
    return model


def _changed_on_the_way() -> Any:
    model = _layer()
    double = model.weight * 2
    double.mul_(3)
    model.result = double + 1
    return model


def _part_changed_through_data() -> Any:
    model = _layer()
    model.result = torch.stack([model.weight, model.weight * 2])
    model.result[0].data.zero_()
    return model


def _both(build: Callable[[], Any], way: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    model = di.deferred_init(build)
    if way == "materialize":
        di.materialize(model, "cpu", verify="full")
    else:
        di.materialize_module(model)
    return model, eager


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)  # tells -0 from 0


@pytest.mark.parametrize("way", ["materialize", "materialize_module"])
@pytest.mark.parametrize(
    "build",
    [
        _masked,
        _copy_changed,
        _changed_without_gradient,
        _changed_itself,
        _changed_through_a_view,
        _changed_on_the_way,
        _part_changed_through_data,
    ],
)
def test_what_was_written_into_a_computed_tensor_is_in_it(
    build: Callable[[], Any], way: str
) -> None:
    model, eager = _both(build, way)
    assert torch.equal(_bits(model.result), _bits(eager.result))
    assert torch.equal(_bits(model.weight), _bits(eager.weight))


def _pruned(method: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = _layer()
        method(model, "weight", amount=0.5, **options)
        return model

    return build


@pytest.mark.parametrize(
    "build",
    [
        _masked,
        _pruned(prune.l1_unstructured),
        _pruned(prune.random_unstructured),
        _pruned(prune.ln_structured, n=2, dim=0),
        _pruned(prune.random_structured, dim=0),
    ],
)
def test_gradients_flow_through_a_mask_that_was_written(
    build: Callable[[], Any],
) -> None:
    model, eager = _both(build, "materialize")
    for one in (model, eager):
        one.found = getattr(one, "result", one.weight)
    assert torch.equal(_bits(model.found), _bits(eager.found))
    assert (model.found == 0).any()
    found, expected = (
        torch.autograd.grad(m.found.sum(), _leaf(m))[0] for m in (model, eager)
    )
    assert torch.equal(found, expected)


def _leaf(model: Any) -> Tensor:
    return next(p for name, p in model.named_parameters() if "weight" in name)

"""Laws of parts and of damage: any order gives eager's bits, any damage is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor, nn

import deferred_init as di
from deferred_init.audit import run_audit, take_snapshot
from deferred_init.poison import fill_poison
from tests.reliability.made import eager, recorded
from tests.reliability.portrait import Portrait, assert_equal, generators
from tests.reliability.tally import tally
from tests.reliability.trees import ACTIONS, Program, programs

# A known limit: `test_a_live_view_is_no_leaf_if_its_parameter_was_made_before`.
WITHOUT_LIVE_VIEWS = tuple(name for name in ACTIONS if name != "live view")


@given(programs(WITHOUT_LIVE_VIEWS), st.randoms(use_true_random=False))
def test_parts_may_be_made_in_any_order(program: Program, random: object) -> None:
    _, expected, states = eager(program)
    model = recorded(program)
    before = generators()
    parts = [m for m in model.modules() if m is not model]
    random.shuffle(parts)  # type: ignore[attr-defined]
    for part in parts[:6]:
        di.materialize_module(part)
        assert generators() == before
    tensors = [t for t in model.parameters() if di.is_deferred(t)]
    random.shuffle(tensors)  # type: ignore[attr-defined]
    for tensor in tensors[:4]:
        assert di.materialize_tensor(tensor) is tensor
    di.materialize(model, "cpu", strict=False)  # also what only plain lists hold
    found = Portrait(model)
    assert_equal(found.facts, expected)
    if found.tensors:
        event("whole" if generators() == states else "in parts")


Damage = Callable[[nn.Module, str, Tensor], None]
DAMAGES: dict[str, tuple[str, Damage]] = {}


def damage(*codes: str) -> Callable[[Damage], Damage]:
    """Register what may happen to a tensor, and the codes that may tell of it."""

    def register(function: Damage) -> Damage:
        DAMAGES[function.__name__.strip("_")] = (codes, function)
        return function

    return register


def _put(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    tables = (module._parameters, module._buffers)
    next(table for table in tables if name in table)[name] = tensor


@damage("deferred-tensor", "parametrization-broken", "rnn-flat-weights")
def _left_on_meta(module: nn.Module, name: str, tensor: Tensor) -> None:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    _put(module, name, empty)


@damage("replaced-object", "broken-tie", "broken-view", "optimizer-stale")
def _replaced_by_a_copy(module: nn.Module, name: str, tensor: Tensor) -> None:
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    _put(module, name, copy)


@damage("lost-tensor", "optimizer-stale")
def _lost(module: nn.Module, name: str, tensor: Tensor) -> None:
    for table in (module._parameters, module._buffers):
        table.pop(name, None)


@damage("requires-grad-changed")
def _thawed_or_frozen(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()))
    tensor.requires_grad_(not tensor.requires_grad)


@damage("geometry-changed")
def _of_another_shape(module: nn.Module, name: str, tensor: Tensor) -> None:
    tensor.data = torch.zeros((*tensor.shape, 3), dtype=tensor.dtype)


@damage("wrong-dtype", "integer-buffer-cast", "geometry-changed")
def _cast(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(not isinstance(tensor, nn.Parameter) or tensor.is_floating_point())
    other = torch.float64 if tensor.dtype is not torch.float64 else torch.float32
    assume(not tensor.is_complex())
    tensor.data = tensor.data.to(other)


@damage("poison-left", "not-finite")
def _never_written(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(tensor.numel() and tensor.dtype not in (torch.bool, torch.uint8))
    assume(tensor.is_contiguous())
    fill_poison(tensor.detach())


@damage("not-finite")
def _nan(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(tensor.numel() and tensor.is_floating_point())
    assume(tensor.is_contiguous())
    tensor.detach().view(-1)[0] = torch.nan


@damage("lost-attribute")
def _without_its_attributes(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(vars(tensor))
    vars(tensor).clear()


@damage("mode-changed")
def _in_the_other_mode(module: nn.Module, name: str, tensor: Tensor) -> None:
    module.training = not module.training


@damage("lost-module-hook")
def _without_hooks(module: nn.Module, name: str, tensor: Tensor) -> None:
    assume(module._forward_hooks)
    module._forward_hooks.clear()


@given(programs(), st.sampled_from(sorted(DAMAGES)), st.integers(0, 99))
def test_whatever_is_damaged_is_found(program: Program, kind: str, at: int) -> None:
    codes, do = DAMAGES[kind]
    model = recorded(program)
    expected = take_snapshot((model,))
    di.materialize(model, "cpu", strict=False)
    healthy = run_audit((model,), verify="full", expected=expected)
    places = [
        (module, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    assume(places)
    do(*places[at % len(places)])
    event(kind)
    found = run_audit((model,), verify="full", expected=expected)
    seen = Counter((f.code, f.fqn) for f in found)
    seen -= Counter((f.code, f.fqn) for f in healthy)
    assert {code for code, _ in seen} & set(codes), seen
    tally["mutations of trees"] += 1

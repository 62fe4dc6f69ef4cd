"""Constructors and init methods that are replaced, decorated, or run more than once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import made_as_eager, on_meta


def _normal_weight(self: Any) -> None:
    nn.init.normal_(self.weight)


def _both(self: Any) -> None:
    nn.init.normal_(self.weight)
    nn.init.ones_(self.bias)


def _pair() -> type[nn.Module]:
    """A new class, since its methods will be replaced."""

    class Pair(nn.Module):
        with_bias = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.bias = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight)
            if self.with_bias:
                nn.init.zeros_(self.bias)

    return Pair


@pytest.mark.parametrize(
    ("name", "new"), [("reset_parameters", _normal_weight), ("with_bias", False)]
)
def test_a_method_is_tried_again_in_the_next_call(name: str, new: Any) -> None:
    kind: Any = _pair()
    made_as_eager(kind)
    setattr(kind, name, new)
    with pytest.raises(di.PlanError, match="1 tensor has no initializer: `bias`"):
        di.materialize(on_meta(kind), "cpu")


def test_a_constructor_that_was_replaced_is_read_again() -> None:
    kind: Any = _pair()
    made_as_eager(kind)

    def construct(self: Any) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))
        self.init_weights()

    kind.init_weights = _both
    kind.__init__ = construct
    _, report = made_as_eager(kind)
    assert report.assumptions == ()
    construct.__code__ = _seeding.__code__  # as IPython's autoreload does it
    (text,) = di.plan(on_meta(kind), "cpu").assumptions
    assert text.startswith("what the constructor of _pair.<locals>.Pair calls")


def _seeding(self: Any) -> None:
    nn.Module.__init__(self)
    self.weight = nn.Parameter(torch.empty(3))
    self.bias = nn.Parameter(torch.empty(3))
    torch.manual_seed(3)
    self.init_weights()


def _decorated(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def inner(self: Any, *args: Any, **kwargs: Any) -> None:
        function(self, *args, **kwargs)
        self.config = dict(kwargs)

    return inner


class _Composite(nn.Module):
    """As diffusers decorates constructors."""

    @_decorated
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self._finish()

    @_decorated
    def _finish(self) -> None:
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.linear.weight, std=0.02)


def test_what_a_decorated_constructor_calls_is_run() -> None:
    _, report = made_as_eager(_Composite)
    assert report.assumptions == ()


class _Wrapped(nn.Module):
    """Its method was decorated without `functools.wraps`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_a_method_that_hides_its_arguments_is_run() -> None:
    original = _Wrapped.reset_parameters

    def hidden(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    _Wrapped.reset_parameters = hidden  # type: ignore[method-assign]
    _, report = made_as_eager(_Wrapped)
    assert report.assumptions == ()


class _Registered(nn.Module):
    """Registers a name that holds nothing, saves a buffer, or is in training, or not.

    The method finds out which, and fills `bias` in one of the two.
    """

    def __init__(self, how: str, on: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(2), persistent=how != "save" or on)
        if how == "nothing" and on:
            self.register_parameter("gate", None)
        self.train(how != "train" or on)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.table)
        gated = hasattr(self, "gate")
        if gated or not self.training or "table" in self._non_persistent_buffers_set:
            nn.init.zeros_(self.bias)


@pytest.mark.parametrize(
    ("how", "fills"), [("nothing", True), ("save", False), ("train", False)]
)
def test_modules_that_differ_in_what_no_slot_shows_are_tried_apart(
    how: str, fills: bool
) -> None:
    model = on_meta(
        lambda: nn.Sequential(_Registered(how, fills), _Registered(how, not fills))
    )
    with pytest.raises(di.PlanError, match=r"^1 tensor has no .*: `1.bias`"):
        di.materialize(model, "cpu")


class _Twice(nn.Linear):
    """As LoRA layers are written: `super().__init__` calls the method, too."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.ones_(self.scale)


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        for _ in range(2):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class _Asked(nn.Module):
    def __init__(self, init: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if init:
            self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.linear.weight)


def _written_later() -> nn.Module:
    model = _pair()()
    nn.init.ones_(model.weight)  # type: ignore[arg-type]
    return model


def _replaced_later() -> nn.Module:
    model = _pair()()
    method = types.MethodType(lambda self: _both(self), model)
    model.reset_parameters = method  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_Twice, "`weight`, `bias`: what was written there after"),
        (_Loop, "`weight`: what was written there after"),
        (lambda: _Asked(False), "`linear.weight`: copied or put there after"),
        (_written_later, "`weight`: what was written there after"),
        (_replaced_later, "`reset_parameters` of a _pair.<locals>.Pair module was"),
    ],
)
def test_writes_that_the_methods_do_not_account_for_are_named(
    build: Callable[[], nn.Module], said: str
) -> None:
    torch.manual_seed(0)
    eager = build().state_dict()
    model = on_meta(build)
    report = di.materialize(model, "cpu", seed=0)
    found = model.state_dict()
    assert not all(torch.equal(found[name], eager[name]) for name in eager)
    (text,) = report.assumptions
    assert text.startswith(said)
    assert "build the model inside `deferred_init(...)`" in text


class _Truncated(nn.Module):
    """`trunc_normal_` of torch 2.13 returns at once on meta, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight)
        with torch.no_grad():
            self.weight[:1] = 0


def test_writes_that_the_methods_account_for_are_not_named() -> None:
    built = (_Truncated, _pair(), lambda: _Asked(True))
    model = on_meta(lambda: nn.Sequential(*(build() for build in built)))
    for _ in range(2):
        assert di.plan(model, "cpu").assumptions == ()


def test_a_plan_counts_no_writes_to_the_tensors_of_the_model() -> None:
    model = on_meta(lambda: nn.Sequential(_pair()(), _Truncated()))
    before = [tensor._version for tensor in model.parameters()]
    di.plan(model, "cpu")
    assert [tensor._version for tensor in model.parameters()] == before

"""What the code of constructors tells against the order of a tree is not silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di


class _Options(nn.Module):
    """As timm's models: an init method with options, which the constructor uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.init_weights(std=0.5)

    def init_weights(self, std: float = 0.02) -> None:
        nn.init.normal_(self.linear.weight, std=std)


class _Defaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.init_weights()

    init_weights = _Options.init_weights


class _Given(nn.Module):
    """As a residual block that is given its downsampling."""

    def __init__(self, down: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.down = down


def _given() -> nn.Module:
    return _Given(nn.Linear(3, 3))


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.linear = nn.Linear(3, 3)
        if norm is None:
            norm = nn.Linear(3, 3)
        self.norm = norm


def _wrapped() -> nn.Module:
    return _Wrapped(nn.Linear(3, 3))


class _Optional(nn.Module):
    """Makes what it is not given, which stands where it was made."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = norm if norm is not None else nn.Linear(3, 3)
        self.other = norm or nn.Linear(3, 3)


def _conv() -> nn.Module:
    return nn.Conv2d(3, 3, 1, bias=False)


class _GivenNorm(nn.Module):
    def __init__(self, down: nn.Module) -> None:
        super().__init__()
        self.conv = _conv()
        self.norm = nn.BatchNorm2d(3)
        self.down = down


class _DrawnAgain(nn.Module):
    """As a ResNet: its blocks are given modules, and all weights are drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.block = _GivenNorm(nn.Sequential(_conv(), nn.BatchNorm2d(3)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)


class _NewHead(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential()
        self.other = nn.Linear(3, 3)


class _Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.reset_parameters()
        self.linear = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class _Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.linear = nn.Linear(3, 3)
        self.reset_parameters()

    reset_parameters = _Early.reset_parameters


class _Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(3, 3)


class _Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(3, 3)
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(2))


class _NewBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.bias = nn.Parameter(torch.ones(3))


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _equals_eager(build: Callable[[], nn.Module]) -> bool:
    torch.manual_seed(0)
    eager = build().state_dict()
    model = _on_meta(build)
    di.materialize(model, "cpu", seed=0)
    found = model.state_dict()
    return all(torch.equal(found[name], eager[name]) for name in eager)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_Options, "the constructor of _Options calls `init_weights` with arguments"),
        (_given, "`down` of _Given, which its constructor was given, is taken to be"),
        (_NewHead, "`head` of _NewHead stands in the place of what a base class"),
        (_Early, "`linear` of _Early was constructed before `reset_parameters` ran"),
        (_Seeds, "what the constructor of _Seeds calls (`manual_seed`) leaves"),
        (_Copies, "`layers.0.weight`, `layers.0.bias`, `layers.1.weight`"),
        (_NewBias, "`linear.bias`: copied or put there after the constructor"),
    ],
)
def test_a_constructor_that_the_tree_does_not_show_is_named(
    build: Callable[[], nn.Module], said: str
) -> None:
    (text,) = di.plan(_on_meta(build), "cpu").assumptions
    assert text.startswith(said)
    assert "build the model inside `deferred_init(...)`" in text
    assert not _equals_eager(build)


@pytest.mark.parametrize(
    "build", [_Defaults, _wrapped, _Base, _Late, _Optional, _DrawnAgain]
)
def test_a_constructor_that_the_tree_shows_is_not_named(
    build: Callable[[], nn.Module],
) -> None:
    assert di.plan(_on_meta(build), "cpu").assumptions == ()
    assert _equals_eager(build)


class _Asks(nn.Module):
    """Names its method in a string as well, before it makes the layer."""

    def __init__(self) -> None:
        super().__init__()
        assert getattr(self, "reset_parameters", None)
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)


def _generated() -> nn.Module:
    """A module whose methods were generated, so that they are of no module."""
    names: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(
        "def __init__(self):\n"
        "    nn.Module.__init__(self)\n"
        "    self.scale = nn.Parameter(torch.empty(2))\n"
        "    self.reset_parameters()\n"
        "def reset_parameters(self):\n"
        "    nn.init.uniform_(self.scale)\n",
        names,
    )
    methods = {key: names[key] for key in ("__init__", "reset_parameters")}
    assert methods["__init__"].__module__ is None
    made: nn.Module = type("_Generated", (nn.Module,), methods)()
    return made


@pytest.mark.parametrize("build", [_Asks, _generated])
def test_unusual_constructors_are_read_too(build: Callable[[], nn.Module]) -> None:
    assert di.plan(_on_meta(build), "cpu").assumptions == ()
    assert _equals_eager(build)


def _three() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


def test_a_real_module_before_others_that_draw_is_named() -> None:
    torch.manual_seed(0)
    eager = _three()
    model: Any = _on_meta(_three)
    model[1] = nn.Linear(3, 3)
    report = di.materialize(model, "cpu", seed=0)
    assert not torch.equal(model[2].weight, eager[2].weight)
    (text,) = report.assumptions
    assert text.startswith("`1`, with memory already, drew no random numbers")

    model = _on_meta(_three)
    loaded = {
        f"1.{name}": torch.ones(s) for name, s in (("weight", (3, 3)), ("bias", 3))
    }
    report = di.materialize(model, "cpu", seed=0, weights=loaded, missing="any")
    assert report.assumptions == ()
    assert torch.equal(model[2].weight, eager[2].weight)


def test_a_real_module_after_all_others_is_not_named() -> None:
    model: Any = _on_meta(_three)
    model[2] = nn.Linear(3, 3)
    assert di.plan(model, "cpu").assumptions == ()
    recorded: Any = di.deferred_init(_three)
    recorded[1] = nn.Linear(3, 3)
    assert di.plan(recorded, "cpu").assumptions == ()

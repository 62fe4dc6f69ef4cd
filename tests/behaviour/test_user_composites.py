"""Modules that initialize their children: by their own method, `apply`, a parent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import made_as_eager, on_meta


class Block(nn.Module):
    def __init__(self, call: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        if call:
            self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.first.weight, std=0.1)
        with torch.no_grad():
            self.second.weight.mul_(0.5)


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def init_weights(self) -> None:
        nn.init.normal_(self.first.weight, std=0.1)


@pytest.mark.parametrize("kind", [Block, NeverCalled])
def test_a_composite_is_initialized_again_only_if_its_constructor_says_so(
    kind: type[nn.Module],
) -> None:
    made_as_eager(kind)


def test_a_composite_leaves_loaded_tensors_of_its_children_alone() -> None:
    model = on_meta(Block)
    loaded = {"first.weight": torch.full((3, 3), 7.0)}
    model.load_state_dict(loaded, strict=False, assign=True)
    weight, version = model.first.weight, model.first.weight._version
    di.materialize(model, "cpu", seed=1)
    assert model.first.weight is weight
    assert weight._version == version
    assert weight.eq(7).all()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.empty(2))})
        self._setup()

    def _setup(self) -> None:
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in [*self.weights, *self.named.values()]:
            nn.init.normal_(weight)


def test_an_owner_fills_its_parameter_lists_and_dicts() -> None:
    made_as_eager(Listed, verify="full")


class Applies(nn.Module):
    """The habit of many transformers: `self.apply(self._init_weights)`."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def test_an_applied_init_function_is_run_as_the_constructor_did() -> None:
    _, report = made_as_eager(Applies)
    assert not any("Applies writes itself" in text for text in report.assumptions)


class Keeper(nn.Module):
    """Holds bound methods, tensors in lists, and a reference to its parent."""

    def __init__(self, parent: nn.Module | None = None) -> None:
        super().__init__()
        self.parent = [parent]
        self.weight = nn.Parameter(torch.empty(3))
        self.held = [self.weight]
        self.fill = self._fill
        self.reset_parameters()

    def _fill(self) -> None:
        nn.init.normal_(self.held[0])

    def reset_parameters(self) -> None:
        self.fill()


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.keeper = Keeper(self)


def test_methods_kept_in_attributes_and_references_to_parents_do_no_harm() -> None:
    model, _ = made_as_eager(Parent)
    assert model.keeper.held[0] is model.keeper.weight

"""What registering refuses, and who is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.handlers import registry
from deferred_init.handlers.registry import unregister_initializer


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, device="meta"))


def _fill(module: nn.Module) -> None:
    nn.init.ones_(module.weight)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    unregister_initializer(Mine)


@pytest.mark.parametrize("wrong", [int, "Mine", nn.Linear(1, 1)])
def test_only_types_of_modules_have_rules(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"expected a subclass of nn\.Module, got"):
        di.register_initializer(wrong, _fill)


def test_a_rule_has_to_be_a_function_or_an_initializer() -> None:
    with pytest.raises(TypeError, match="expected a function or an Initializer, got 3"):
        di.register_initializer(Mine, 3)
    assert not registry.has_user_rule(Mine)


def test_a_second_rule_for_a_type_names_the_first() -> None:
    assert di.register_initializer(Mine)(_fill) is _fill
    with pytest.raises(ValueError, match="Mine already has the registered rule"):
        di.register_initializer(Mine, _fill)
    model = Mine()
    di.materialize(model, "cpu", seed=0)
    assert model.weight.tolist() == [1.0, 1.0]


def test_an_initializer_object_is_asked_itself() -> None:
    known = registry.initializers_for(nn.Linear)[0]
    assert di.register_initializer(Mine, known) is known
    assert registry.initializers_for(Mine)[0] is known


def test_two_built_in_handlers_of_one_type_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_initializers", dict(registry._initializers))
    monkeypatch.setattr(registry, "_allocators", dict(registry._allocators))
    first, second = registry.initializers_for(nn.Linear)[:2]
    registry.add_initializer(first, Mine)
    with pytest.raises(ValueError, match="Mine is claimed by both"):
        registry.add_initializer(second, Mine)

    class Special(torch.Tensor):
        pass

    plain = registry.allocator_for(torch.empty(0))
    assert plain is not None
    registry.add_allocator(plain, Special)
    with pytest.raises(ValueError, match="Special has two allocators"):
        registry.add_allocator(first, Special)


def test_what_is_remembered_of_types_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_MAX_TYPES", 3)
    for index in range(10):
        registry.initializers_for(type(f"Layer{index}", (nn.Module,), {}))
        assert len(registry._asked) <= 3

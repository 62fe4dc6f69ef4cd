"""The parts that decide what an init method writes."""

from __future__ import annotations

import torch
from torch import nn

from deferred_init.constructor_names import calls_of, init_methods, writes_of
from deferred_init.hollow import hollow
from deferred_init.inventory import take_inventory
from deferred_init.write_probe import likeness


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._setup()

    def _setup(self) -> None:
        (lambda: self.init_weights())()

    def init_weights(self) -> None:
        pass

    def reset_parameters(self) -> None:
        pass

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.ones_(module.weight)


def test_calls_are_found_through_own_methods_and_nested_code() -> None:
    assert "init_weights" in calls_of(Base)
    assert init_methods(Base) == (("init_weights",), True)


def test_without_a_call_the_first_method_is_taken_and_is_uncertain() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()

        def init_weights(self) -> None:
            pass

        def reset_parameters(self, scale: float = 1.0) -> None:
            pass

    assert init_methods(Silent) == (("reset_parameters",), False)


def test_methods_of_torch_and_methods_with_arguments_do_not_count() -> None:
    assert init_methods(nn.Linear) == ((), False)
    assert "_init_weights" not in init_methods(Base)[0]


def test_writing_names_in_user_constructors_are_found() -> None:
    class Writes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            nn.init.zeros_(self.bias)
            self.weight.requires_grad_(False)

    assert writes_of(Writes) == ("zeros_",)
    assert writes_of(nn.Linear) == ()


def test_a_hollow_tensor_does_not_say_that_it_is_on_meta() -> None:
    weight = hollow(nn.Parameter(torch.empty(3, device="meta"), requires_grad=False))
    assert isinstance(weight, nn.Parameter)
    assert not weight.is_meta
    assert not weight[:2].is_meta
    assert weight.device.type == "meta"
    assert not weight.requires_grad
    assert not hollow(torch.ones(2)).is_meta


def test_only_modules_made_of_plain_values_are_alike() -> None:
    def key(module: nn.Module) -> object:
        return likeness(take_inventory((module,)).roots[0])

    first, second = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    assert key(first) == key(second) is not None
    assert key(first) != key(nn.Linear(2, 2, bias=False, device="meta"))
    second.out_features = 3
    assert key(first) != key(second)
    second.config = object()
    assert key(second) is None
    assert key(nn.Sequential(first)) is None

"""The memory that weights are lent until they are quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.fast.distributions import Normal
from deferred_init.fast.fill import fillable
from deferred_init.handlers.ecosystems import load_handlers
from deferred_init.inventory import take_inventory
from deferred_init.slots import Slot
from deferred_init.te.high_precision import lent_high_precision, shares_buffer

pytestmark = pytest.mark.te
CPU = torch.device("cpu")


def _weights(module: nn.Module) -> list[Slot]:
    return [slot for slot in take_inventory([module]).slots if "_weight" in slot.name]


def _mlp(te: Any, kind: Any = None, **kwargs: Any) -> Any:
    kind = kind or te.LayerNormMLP
    mlp = kind(8, 16, activation="swiglu", device="meta", **kwargs)
    return mlp, [slot for slot in _weights(mlp) if slot.name.startswith("fc")]


def test_weights_of_a_module_share_a_buffer_of_the_largest_and_draw_as_in_eager(
    te: Any,
) -> None:
    mlp, slots = _mlp(te)
    drawn: dict[str, torch.Tensor] = {}
    with lent_high_precision(mlp, slots, None, CPU) as buffer:
        assert buffer is not None
        assert buffer.numel() == max(slot.tensor.numel() for slot in slots)
        torch.manual_seed(0)
        for slot in slots:
            assert slot.read().size() == slot.tensor.size()
            assert not slot.read().requires_grad
            mlp.param_init_meta[slot.name].init_fn(slot.read())
            assert shares_buffer(slot.read(), buffer)
            drawn[slot.name] = slot.read().detach().clone()
    assert all(slot.read() is slot.tensor for slot in slots)
    torch.manual_seed(0)
    twin = te.LayerNormMLP(8, 16, activation="swiglu", device="cpu")
    for name, values in drawn.items():
        assert torch.equal(values, twin._parameters[name]), name


def test_weights_that_a_fast_fill_writes_have_all_of_what_they_are_lent(
    te: Any,
) -> None:
    mlp, slots = _mlp(te)
    with lent_high_precision(mlp, slots, None, CPU, "fast") as buffer:
        assert buffer is None  # else `fc2_weight` would be a part of a larger memory
    single = [slot for slot in slots if slot.name == "fc2_weight"]
    for module, weights in ((mlp, single), _squares(te)):
        with lent_high_precision(module, weights, None, CPU, "fast") as buffer:
            assert buffer is not None
            assert all(fillable(slot.read(), Normal(0.0, 1.0)) for slot in weights)


def _squares(te: Any) -> Any:
    mlp = te.LayerNormMLP(8, 16, device="meta")
    return mlp, [slot for slot in _weights(mlp) if slot.name.startswith("fc")]


def test_what_was_put_into_a_slot_stays_there(te: Any) -> None:
    mlp, slots = _mlp(te)
    made = nn.Parameter(torch.zeros(slots[0].tensor.size()))
    with lent_high_precision(mlp, slots, None, CPU) as buffer:
        slots[0].write(made)
        assert not shares_buffer(made, buffer)
    assert slots[0].read() is made
    assert slots[1].read() is slots[1].tensor


def test_the_slots_are_put_back_when_the_method_fails(te: Any) -> None:
    mlp, slots = _mlp(te)
    with (
        pytest.raises(RuntimeError, match="here"),
        lent_high_precision(mlp, slots, None, CPU),
    ):
        raise RuntimeError("here")
    assert all(slot.read() is slot.tensor for slot in slots)


def test_code_of_users_gets_memory_of_its_own(te: Any) -> None:
    class Own(te.LayerNormMLP):  # type: ignore[misc,name-defined]
        def reset_parameters(self, defer_init: bool = False) -> None:
            super().reset_parameters(defer_init=defer_init)

    class Custom:
        def custom(self) -> bool:
            return True

    def fill(tensor: torch.Tensor) -> None:
        nn.init.ones_(tensor)

    own, by_function, plain = _mlp(te, Own), _mlp(te, init_method=fill), _mlp(te)
    for (module, slots), recipe in (
        (own, None),
        (by_function, None),
        (plain, Custom()),
    ):
        with lent_high_precision(module, slots, recipe, CPU) as buffer:
            assert buffer is None
            assert all(slot.read() is slot.tensor for slot in slots)


def test_a_model_without_fusible_operations_is_not_searched_for_fusers(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []

    def search(roots: Any) -> Any:
        searched.append(roots)
        return iter(())

    load_handlers()
    monkeypatch.setattr("deferred_init.te.fusers.find_fusers", search)
    di.materialize(te.Linear(4, 4, device="meta"), "cpu")
    assert not searched
    di.materialize(te.ops.Linear(4, 4, device="meta"), "cpu")
    assert searched

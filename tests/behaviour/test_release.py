"""What `materialize` leaves behind goes with the model, without a garbage collection.

Long jobs switch the collector off. A model that somebody replaces must then free its
memory at once, as one that was built eagerly does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import on_meta

pytestmark = pytest.mark.usefixtures("no_collector")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", self.embed.weight.detach().sum(), False)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


def read_elsewhere() -> nn.Module:
    """One recording reads what another one made."""
    first = di.deferred_init(Tied)

    def second() -> nn.Module:
        model = Tied()
        with torch.no_grad():
            model.norm.bias.copy_(first.norm.weight)
        return model

    return nn.ModuleList([first, di.deferred_init(second)])


WAYS: dict[str, Callable[[], nn.Module]] = {
    "meta": lambda: on_meta(plain),
    "meta, transformer": lambda: on_meta(transformer),
    "recorded": lambda: di.deferred_init(plain),
    "recorded, tied": lambda: di.deferred_init(Tied),
    "recorded, reads another": read_elsewhere,
}


@pytest.mark.parametrize("rng", ["eager", "by_name", "fast"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_freed_when_its_last_name_goes(way: str, rng: str) -> None:
    model = WAYS[way]()
    di.materialize(model, "cpu", seed=0, rng=rng, verify="full", progress=False)
    left = [weakref.ref(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    left += [weakref.ref(module) for module in model.modules()]

    del model

    assert [type(ref()).__name__ for ref in left if ref() is not None] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_alone_keeps_nothing(way: str) -> None:
    model = WAYS[way]()
    di.plan(model, "cpu", seed=0)
    left = [weakref.ref(module) for module in model.modules()]

    del model

    assert [type(ref()).__name__ for ref in left if ref() is not None] == []

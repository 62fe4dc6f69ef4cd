"""Collections of garbage while a model is made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import deferred_init as di


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Knotted(nn.Linear):
    """Its init code leaves a cycle that holds a tensor."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight.is_meta:
            return
        knot = torch.zeros(1)
        knot.itself = knot
        self.alive.add(knot)
        type(self).most = max(self.most, len(self.alive))


def test_cycles_of_init_code_do_not_pile_up() -> None:
    model = nn.Sequential(*(Knotted(2, 2, device="meta") for _ in range(600)))
    di.materialize(model, "cpu", seed=0, progress=False)
    assert 0 < Knotted.most < 300


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (90_000, 3, 5)])
def test_thresholds_are_put_back(before: tuple[int, int, int]) -> None:
    seen = []

    class Looking(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            seen.append(gc.get_threshold())

    model = Looking(2, 2, device="meta")
    gc.set_threshold(*before)
    seen.clear()
    di.materialize(model, "cpu", seed=0, progress=False)
    assert gc.get_threshold() == before
    young, _, old = seen[-1]
    assert young == before[0]
    assert old > 1_000_000

    broken = Looking(2, 2, device="meta")
    broken.hollow = torch.empty(1, device="meta")
    with pytest.raises(di.PlanError):
        di.materialize(broken, "cpu", seed=0, progress=False)
    assert gc.get_threshold() == before

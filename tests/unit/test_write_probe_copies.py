"""Modules whose constructors keep functions: the twin of a dry run has its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import deferred_init as di


class KeepsPartial(nn.Module):
    """Keeps how it is initialized, with arguments bound."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.init = functools.partial(nn.init.normal_, std=0.02)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.init(self.weight)


class KeepsMethod(nn.Module):
    """Keeps a bound method of its own, and calls that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.fill = self._fill
        self.reset_parameters()

    def _fill(self) -> None:
        nn.init.uniform_(self.weight, 1.0, 2.0)

    def reset_parameters(self) -> None:
        self.fill()


class KeepsNest(nn.Module):
    """Keeps functions in containers within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("scale", torch.empty(4))
        self.plan = {"fills": [(self._fill, functools.partial(self._fill_scale, 3.0))]}
        self.reset_parameters()

    def _fill(self) -> None:
        nn.init.xavier_normal_(self.weight)

    def _fill_scale(self, value: float) -> None:
        self.scale.fill_(value)

    def reset_parameters(self) -> None:
        for fills in self.plan["fills"]:
            for fill in fills:
                fill()


@pytest.mark.parametrize("make", [KeepsPartial, KeepsMethod, KeepsNest])
def test_a_module_that_keeps_functions_equals_eager(
    make: Callable[[], nn.Module],
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), make(), nn.Linear(2, 2))

    torch.manual_seed(0)
    eager = build()
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(1)
    di.materialize(model, "cpu", seed=0)
    for (name, wanted), found in zip(
        eager.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, wanted), name
    assert torch.equal(torch.get_rng_state(), state)


class Outside(nn.Module):
    """Its reset method writes to a tensor that is not its own."""

    shared = torch.zeros(4)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        Outside.shared.add_(1)
        nn.init.ones_(self.weight)


def test_a_dry_run_writes_to_nothing_outside_of_the_module() -> None:
    with torch.device("meta"):
        model = Outside()
    before = Outside.shared.clone()
    with pytest.raises(di.PlanError, match="it writes to a tensor outside of the mod"):
        di.materialize(model, "cpu", seed=0)
    assert torch.equal(Outside.shared, before)
    assert model.weight.is_meta

"""Values by name do not depend on where else a model keeps its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.tensor_names import TensorNames

POLICIES = ["by_name", "fast"]


class Block(nn.Module):
    """Draws for a weight and a buffer of its own beside those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 8)))
        self.register_buffer("noise", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)) @ self.scale) + self.noise


class Blocks(nn.Module):
    """What `pipeline` cuts into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _stages() -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = di.deferred_init(Blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = pipeline(
            model,
            (torch.randn(2, 8, device="meta"),),
            split_spec={"blocks.2": SplitPoint.BEGINNING},
        )
    return [cut.get_stage_module(index) for index in range(2)]


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rng", POLICIES)
def test_stages_that_pipeline_cut_agree_with_the_whole(
    rng: str, together: bool
) -> None:
    whole: Any = di.deferred_init(Blocks)
    di.materialize(whole, "cpu", seed=5, rng=rng)
    stages = _stages()
    for models in [stages] if together else [[stage] for stage in reversed(stages)]:
        di.materialize(models, "cpu", seed=5, rng=rng)
    expected = _values(whole)
    made = {**_values(stages[0]), **_values(stages[1])}
    assert made.keys() == expected.keys()
    for name, value in made.items():
        assert torch.equal(value, expected[name]), name


class Looking(nn.Module):
    """Keeps another module, or a tensor of it, where torch does not look."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.held = [] if held is None else [held]


def _pair(held: Callable[[nn.Module], Any]) -> nn.Module:
    other = nn.Sequential(nn.Linear(3, 3))
    nn.init.orthogonal_(other[0].weight)
    pair = nn.Module()
    pair.looking = Looking(held(other))
    pair.other = other
    return pair


HELD: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda other: None,
    "module": lambda other: other,
    "child": lambda other: other[0],
    "weight": lambda other: other[0].weight,
}


def _built(kind: str, held: str) -> nn.Module:
    if kind == "recorded":
        return di.deferred_init(_pair, HELD[held])
    with torch.device("meta"):
        return _pair(HELD[held])


@pytest.mark.parametrize("held", list(HELD)[1:])
@pytest.mark.parametrize("kind", ["recorded", "on meta"])
@pytest.mark.parametrize("rng", POLICIES)
def test_the_registered_name_of_a_tensor_counts(rng: str, kind: str, held: str) -> None:
    alone, kept = _built(kind, "nothing"), _built(kind, held)
    for model in (alone, kept):
        di.materialize(model, "cpu", seed=5, rng=rng)
    expected = _values(alone)
    assert _values(kept).keys() == expected.keys()
    for name, value in _values(kept).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("rng", POLICIES)
def test_names_are_looked_up_once_for_many_recordings(
    rng: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each would be work by the square of their number."""
    looked, look = [], TensorNames.__init__

    def counted(self: TensorNames, roots: Any) -> None:
        looked.append(roots)
        look(self, roots)

    monkeypatch.setattr(TensorNames, "__init__", counted)
    model = nn.Sequential(*(di.deferred_init(nn.Linear, 2, 2) for _ in range(5)))
    di.materialize(model, "cpu", seed=5, rng=rng)
    assert len(looked) == 1


@pytest.mark.parametrize("rng", POLICIES)
def test_what_is_registered_nowhere_goes_by_its_place(rng: str) -> None:
    def build() -> nn.Module:
        module = Looking(nn.Linear(3, 3))
        module.table = {"noise": torch.randn(3)}
        return module

    models: list[Any] = [di.deferred_init(build) for _ in range(2)]
    for model in models:
        di.materialize(model, "cpu", seed=5, rng=rng)
    first, second = models
    assert torch.equal(first.held[0].weight, second.held[0].weight)
    assert torch.equal(first.table["noise"], second.table["noise"])
    assert not torch.equal(first.own.weight, first.held[0].weight)

"""What was done to a model on meta after its modules were made is not silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di

META = torch.device("meta")


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _twins() -> nn.Module:
    """As `accelerate.init_empty_weights` leaves a tie behind."""
    model = _pair()
    model[1].weight = nn.Parameter(model[0].weight)
    return model


def _twins_across() -> nn.Module:
    model = _pair()
    model[0].weight = nn.Parameter(model[0].weight.t())
    model[1].weight = nn.Parameter(model[0].weight)
    return model


@pytest.mark.parametrize("build", [_twins, _twins_across])
def test_of_twins_in_one_memory_the_first_keeps_its_values(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    eager = build()
    with META:
        model = build()
    report = di.materialize(model, "cpu", seed=0)
    for name, expected in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name
    first, second = model[0].weight, model[1].weight
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert any("`1.weight`: shared" in text for text in report.assumptions)


def test_a_twin_of_a_loaded_tensor_is_not_initialized_over_it() -> None:
    with META:
        model = _twins()
    loaded = torch.full((4, 4), 3.0)
    di.materialize(model, "cpu", weights={"0.weight": loaded}, missing="any")
    assert torch.equal(model[0].weight, loaded)
    assert torch.equal(model[1].weight, loaded)


def _zeroed() -> nn.Module:
    model = _pair()
    nn.init.zeros_(model[1].weight)
    return model


def _run() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.zeros(2, 4))
    return model


def _cast() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_zeroed, "`1.weight`: what was written there after"),
        (_run, "`1.num_batches_tracked`: what was written there after"),
        (_cast, "`0.weight`, `0.bias`: constructed in torch.bfloat16; where"),
    ],
)
def test_what_may_differ_from_eager_is_named(
    build: Callable[[], nn.Module], said: str
) -> None:
    with META:
        model = build()
    (text,) = di.plan(model, "cpu").assumptions
    assert not _equal(build, model)
    assert text.startswith(said)
    assert "`deferred_init(...)`" in text


def _equal(build: Callable[[], nn.Module], model: nn.Module) -> bool:
    torch.manual_seed(0)
    eager = build().state_dict()
    di.materialize(model, "cpu", seed=0)
    same: list[bool] = [torch.equal(t, eager[n]) for n, t in _state(model)]
    return all(same)


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def test_the_way_out_of_a_cast_gives_eagers_values() -> None:
    torch.manual_seed(0)
    eager = _cast()
    with META:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    report = di.materialize(model, "cpu", seed=0, dtype=torch.bfloat16)
    assert not report.assumptions
    for name, expected in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name


class _Block(nn.Module):
    """As diffusers fills its blocks: one loop, two lists, registered afterwards."""

    def __init__(self) -> None:
        super().__init__()
        lists: tuple[list[nn.Module], list[nn.Module]] = ([], [])
        for _ in range(2):
            for one in lists:
                one.append(nn.Linear(2, 2))
        self.attentions = nn.ModuleList(lists[1])
        self.resnets = nn.ModuleList(lists[0])


def test_lists_that_one_loop_may_have_filled_are_named() -> None:
    with META:
        model = nn.Sequential(_Block(), _Block())
    (text,) = di.plan(model, "cpu").assumptions
    assert text.startswith("the modules in `attentions`, `resnets` of _Block were")
    assert not _equal(lambda: nn.Sequential(_Block(), _Block()), model)
    recorded = di.deferred_init(_Block)
    assert di.plan(recorded, "cpu").assumptions == ()


def test_a_model_as_torch_makes_it_shows_nothing() -> None:
    with META:
        model = nn.Sequential(
            nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
            nn.Embedding(4, 2, padding_idx=0),
            nn.EmbeddingBag(4, 2, padding_idx=0),
            nn.BatchNorm2d(3),
            nn.LSTM(2, 3),
            nn.Bilinear(2, 2, 2),
            nn.Conv2d(2, 2, 2),
            nn.PReLU(),
        )
    assert di.plan(model, "cpu").assumptions == ()


def test_gradients_without_memory_are_left_out_and_named() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model(torch.ones(1, 3)).sum().backward()
        return model

    with META:
        on_meta = build()
    for model in (on_meta, di.deferred_init(build)):
        (text,) = di.materialize(model, "cpu").assumptions
        assert text.startswith("`weight`, `bias`: the gradients that were computed")
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_tensor_on_meta_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        rows = [torch.randn(2, 3), torch.randn(4, 3)]
        model.rows = torch.nested.nested_tensor(rows, layout=torch.jagged)

    with pytest.raises(di.PlanError, match=r"`rows`.*NestedTensor"):
        di.materialize(model, "cpu", seed=0)

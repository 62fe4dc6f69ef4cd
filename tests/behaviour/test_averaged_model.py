"""`AveragedModel` built before materialization: a copy of its source, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import deferred_init as di


class Net(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3, device=device)
        self.head = nn.Linear(3, 5, device=device)
        self.norm = nn.BatchNorm1d(5, device=device)
        self.head.weight = self.emb.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.emb(index)))


def _averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _pair() -> tuple[Net, AveragedModel]:
    with torch.device("meta"):
        model = Net()
        return model, _averaged(model)


@pytest.mark.parametrize("averaged_first", [False, True])
@pytest.mark.parametrize("rng", ["eager", "by_name"])
def test_a_copy_gets_the_values_of_its_source_and_draws_nothing(
    averaged_first: bool, rng: str
) -> None:
    torch.manual_seed(3)
    expected = Net()
    state = torch.get_rng_state()
    model, averaged = _pair()
    held = list(averaged.module.parameters())
    models = [averaged, model] if averaged_first else [model, averaged]
    di.materialize(models, "cpu", seed=3, rng=rng)
    if rng == "eager":
        assert torch.equal(model.emb.weight, expected.emb.weight)
        assert torch.equal(torch.get_rng_state(), state)
    ours, theirs = averaged.module.state_dict(), model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(a is b for a, b in zip(averaged.module.parameters(), held, strict=True))
    assert averaged.n_averaged == 0
    assert averaged.module.emb.weight is averaged.module.head.weight
    assert averaged.module.emb.weight is not model.emb.weight


def test_averaging_goes_on_as_in_eager() -> None:
    def train(model: nn.Module, averaged: AveragedModel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.arange(step, step + 3)).pow(2).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)

    torch.manual_seed(3)
    expected = Net()
    expected_average = _averaged(expected)
    train(expected, expected_average)
    model, averaged = _pair()
    di.materialize([model, averaged], "cpu", seed=3)
    train(model, averaged)
    ours, theirs = averaged.state_dict(), expected_average.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_copy_beside_its_source_in_one_model_is_found() -> None:
    with torch.device("meta"):
        net = Net()
        model = nn.ModuleDict({"net": net, "ema": _averaged(net)})
    report = di.materialize(model, "cpu", seed=3)
    assert torch.equal(model["ema"].module.emb.weight, net.emb.weight)
    assert any("`ema` was copied from `net`" in text for text in report.assumptions)


def test_a_copy_of_a_loaded_source_gets_the_loaded_values() -> None:
    model, averaged = _pair()
    loaded = {"emb.weight": torch.ones(5, 3), "head.weight": torch.ones(5, 3)}
    model.load_state_dict(loaded, strict=False, assign=True)
    model.head.weight = model.emb.weight
    di.materialize([model, averaged], "cpu", seed=3)
    assert averaged.module.emb.weight.eq(1).all()


def test_a_copy_without_its_source_is_refused_with_the_remedies() -> None:
    averaged = _pair()[1]
    with pytest.raises(
        di.PlanError,
        match=r"`AveragedModel` \(`AveragedModel`\) is a copy of a `Net`: expected its "
        r"source, one `Net` of the same structure, among the models of this call, "
        r"found none\. Pass both in one list, or build the `AveragedModel` after",
    ):
        di.materialize(averaged, "cpu", seed=3)


def test_a_copy_with_two_possible_sources_is_refused() -> None:
    model, averaged = _pair()
    other = _pair()[0]
    with pytest.raises(di.PlanError, match="found 2 such models"):
        di.materialize([model, other, averaged], "cpu", seed=3)

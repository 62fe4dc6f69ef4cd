"""`materialize` on models that were built inside `deferred_init`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import deferred_init as di


class Odd(nn.Module):
    """Values that no meta model could tell: constants, scaled inits, a buffer view."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4, padding_idx=0)
        self.gamma = nn.Parameter(0.1 * torch.ones(4))
        self.drop = torch.linspace(0, 0.5, 3).tolist()
        self.lin = nn.Linear(4, 4)
        with torch.no_grad():
            self.lin.weight.mul_(0.5).add_(torch.eye(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.lin.bias.requires_grad_(False)
        self.lin.weight.tag = "mine"
        table = torch.outer(torch.arange(4.0), 1 / 10000 ** (torch.arange(4) / 4))
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("row", table[1])
        self.rows = self.lin.weight[:2]
        self.noise = [torch.randn(2)]


def _transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Transformer(8, 2, 1, 2, 16)


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "transformer": _transformer,
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "list": lambda: nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)]),
}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    if isinstance(model, Odd):
        found.update({"rows": model.rows, "noise": model.noise[0]})
    return found


def _assert_equal(made: nn.Module, expected: nn.Module) -> None:
    ours, theirs = _tensors(made), _tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        got = ours[name]
        assert type(got) is type(value), name
        assert (got.dtype, got.stride()) == (value.dtype, value.stride()), name
        assert got.requires_grad == value.requires_grad, name
        assert torch.equal(got, value), name


@pytest.mark.parametrize("name", list(_BUILDERS))
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_a_recorded_model_equals_eager_bit_for_bit(name: str, verify: str) -> None:
    torch.manual_seed(11)
    expected = _BUILDERS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = di.deferred_init(_BUILDERS[name])
    before = _tensors(model)
    report = di.materialize(model, "cpu", verify=verify)
    _assert_equal(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor is before[key] for key, tensor in _tensors(model).items())
    assert report.ok
    assert report.assumptions == ()


@pytest.mark.parametrize("name", ["odd", "list", "lstm"])
def test_a_seed_given_to_materialize_is_the_seed_of_construction(name: str) -> None:
    torch.manual_seed(12)
    expected = _BUILDERS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(99)
    model = di.deferred_init(_BUILDERS[name])
    di.materialize(model, "cpu", seed=12)
    _assert_equal(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_views_attributes_and_gradients_of_computed_tensors_are_as_in_eager() -> None:
    model = di.deferred_init(Odd)
    di.materialize(model, "cpu")
    assert model.lin.weight.tag == "mine"
    model.table.fill_(5)
    assert model.row.eq(5).all()
    model.rows.sum().backward()
    assert model.lin.weight.grad.sum() == 8
    assert model.drop == [0.0, 0.25, 0.5]


def test_an_optimizer_built_on_a_recorded_model_trains_it() -> None:
    model = di.deferred_init(nn.Linear, 3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", optimizers=[optimizer], seed=0)
    before = copy.deepcopy(model.weight.detach())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_two_recordings_in_one_model_each_keep_their_own_stream() -> None:
    torch.manual_seed(1)
    left = nn.Linear(3, 3)
    torch.manual_seed(2)
    right = nn.Linear(3, 3)
    torch.manual_seed(1)
    model = nn.Sequential(di.deferred_init(nn.Linear, 3, 3))
    torch.manual_seed(2)
    model.append(di.deferred_init(nn.Linear, 3, 3))
    di.materialize(model, "cpu")
    _assert_equal(model[0], left)
    _assert_equal(model[1], right)


def test_dtype_is_cast_after_the_last_use_of_a_tensor() -> None:
    torch.manual_seed(3)
    expected = Odd().to(torch.bfloat16)
    torch.manual_seed(3)
    model = di.deferred_init(Odd)
    di.materialize(model, "cpu", dtype=torch.bfloat16)
    for name in ("emb.weight", "gamma", "lin.weight", "table"):
        assert torch.equal(_tensors(model)[name], _tensors(expected)[name]), name


def test_by_name_gives_a_part_the_values_of_the_whole() -> None:
    whole = di.deferred_init(
        lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.LSTM(2, 2)})
    )
    part = di.deferred_init(lambda: nn.ModuleDict({"b": nn.LSTM(2, 2)}))
    state = torch.get_rng_state()
    di.materialize(whole, "cpu", seed=5, rng="by_name")
    di.materialize(part, "cpu", seed=5, rng="by_name")
    for name, value in part.named_parameters():
        assert torch.equal(value, whole.get_parameter(name)), name
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failing_replay_leaves_the_model_recorded_and_a_second_try_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(4)
    expected = Odd()
    torch.manual_seed(4)
    model = di.deferred_init(Odd)
    state = torch.get_rng_state()
    from deferred_init import workspace

    real, calls = workspace.exchange, []

    def failing(*args: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("injected")
        return real(*args)

    monkeypatch.setattr(workspace, "exchange", failing)
    with pytest.raises(di.MaterializeError, match="injected"):
        di.materialize(model, "cpu")
    assert all(tensor.is_meta for tensor in _tensors(model).values())
    assert di.is_deferred(model)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(workspace, "exchange", real)
    di.materialize(model, "cpu")
    _assert_equal(model, expected)


def test_two_recordings_under_one_seed_draw_one_after_the_other() -> None:
    torch.manual_seed(5)
    first, second = nn.Linear(3, 3), nn.LSTM(2, 2)
    third, state = nn.Linear(3, 3), torch.get_rng_state()
    models = [
        di.deferred_init(nn.Linear, 3, 3),
        di.deferred_init(nn.LSTM, 2, 2),
        di.deferred_init(nn.Linear, 3, 3),
    ]
    di.materialize(models, "cpu", seed=5)
    for made, expected in zip(models, (first, second, third), strict=True):
        _assert_equal(made, expected)
    assert torch.equal(torch.get_rng_state(), state)


class Gambler(nn.Module):
    """Its constructor decides by a random value."""

    def __init__(self) -> None:
        super().__init__()
        wide = torch.rand(1).item() > 0.5
        self.lin = nn.Linear(2, 4 if wide else 3)


def test_a_seed_that_would_have_led_the_constructor_elsewhere_is_refused() -> None:
    torch.manual_seed(1)
    model = di.deferred_init(Gambler)
    with pytest.raises(di.PlanError, match=r"looked at random values") as caught:
        di.materialize(model, "cpu", seed=2)
    assert "call torch.manual_seed(2) before `deferred_init(...)`" in str(caught.value)
    torch.manual_seed(1)
    expected = Gambler()
    di.materialize(model, "cpu", seed=1)
    _assert_equal(model, expected)


def test_an_unknown_source_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="values_from must be None or 'cpu'"):
        di.materialize(nn.Linear(2, 2, device="meta"), "cpu", values_from="gpu")

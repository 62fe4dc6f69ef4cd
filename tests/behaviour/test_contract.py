"""The contract of `materialize` for ordinary tensors."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import deferred_init as di


class Tied(nn.Module):
    """Two linears, an embedding tied to the head, norms and a frozen bias."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4, padding_idx=0, device=device)
        self.first = nn.Linear(4, 4, device=device)
        self.norm = nn.BatchNorm1d(4, device=device)
        self.head = nn.Linear(4, 7, bias=False, device=device)
        self.head.weight = self.emb.weight
        self.first.bias.requires_grad_(False)
        self.first.weight.tensor_model_parallel = True
        self.norm.eval()


def _eager(build: type[nn.Module] = Tied, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def _assert_equal(made: nn.Module, expected: nn.Module) -> None:
    ours, theirs = made.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].stride() == value.stride(), name
        assert torch.equal(ours[name], value), name


def test_values_and_final_generator_state_equal_eager_construction() -> None:
    expected = _eager()
    state = torch.get_rng_state()
    model = Tied("meta")
    di.materialize(model, "cpu", seed=3, verify="full")
    _assert_equal(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_current_generator_goes_on() -> None:
    expected = _eager()
    model = Tied("meta")
    torch.manual_seed(3)
    di.materialize(model, "cpu")
    _assert_equal(model, expected)


def test_identity_ties_flags_attributes_and_modes_survive() -> None:
    model = Tied("meta")
    before = dict(model.named_parameters(remove_duplicate=False))
    di.materialize(model, "cpu")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert model.head.weight is model.emb.weight
    assert model.first.weight.tensor_model_parallel is True
    assert not model.first.bias.requires_grad
    assert not model.norm.training
    assert model.first.training


def test_an_optimizer_built_before_trains_the_same_as_one_built_after() -> None:
    batch = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(1))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            hidden = model.first(model.emb(batch))
            nn.functional.cross_entropy(model.head(hidden), batch).backward()
            optimizer.step()

    expected = _eager()
    train(expected, torch.optim.AdamW(expected.parameters()))
    model = Tied("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", optimizers=optimizer, seed=3)
    train(model, optimizer)
    _assert_equal(model, expected)


def test_a_loaded_tensor_is_never_written_and_the_rest_equals_eager() -> None:
    expected = _eager()
    model = Tied("meta")
    loaded = {"first.weight": torch.full((4, 4), 7.0)}
    model.load_state_dict(loaded, strict=False, assign=True)
    weight, version = model.first.weight, model.first.weight._version
    di.materialize(model, "cpu", seed=3)
    assert model.first.weight is weight
    assert weight._version == version
    assert weight.eq(7).all()
    assert torch.equal(model.emb.weight, expected.emb.weight)


def test_a_real_model_is_left_alone_and_the_report_says_so() -> None:
    model = _eager()
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    report = di.materialize(model, "cpu", seed=99)
    assert report.ok
    assert "nothing was deferred" in str(report)
    _assert_equal(model, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_twice_is_the_same_as_once() -> None:
    model = Tied("meta")
    di.materialize(model, "cpu", seed=3)
    before = copy.deepcopy(model)
    di.materialize(model, "cpu", seed=4)
    _assert_equal(model, before)


class Views(nn.Module):
    """A buffer that is a view of another, and a non-leaf view of a parameter."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        table = torch.empty(8, device=device)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("window", table[2:6])
        self.lin = nn.Linear(4, 4, device=device)
        self.rows = self.lin.weight[:2]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(8.0))


def test_views_share_storage_with_their_base_afterwards() -> None:
    model = Views("meta")
    table, window = model.table, model.window
    di.materialize(model, "cpu", verify="full")
    assert model.table is table
    assert model.window is window
    assert window.tolist() == [2, 3, 4, 5]
    table.fill_(9)
    assert window.tolist() == [9, 9, 9, 9]
    assert window._base is table
    assert torch.equal(model.rows, model.lin.weight[:2])
    model.rows.sum().backward()
    assert model.lin.weight.grad.sum() == 8


def test_a_tie_across_two_models_is_one_tensor() -> None:
    actor, critic = nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta")
    critic.weight = actor.weight
    di.materialize([actor, critic], "cpu", seed=0)
    assert actor.weight is critic.weight
    torch.manual_seed(0)
    assert torch.equal(actor.weight, nn.Linear(3, 3).weight)


def test_a_weakly_referenced_parameter_keeps_its_identity() -> None:
    model = Tied("meta")
    weight, reference = model.emb.weight, weakref.ref(model.emb.weight)
    report = di.materialize(model, "cpu", seed=3)
    assert report.ok
    assert reference() is weight is model.emb.weight
    assert not weight.is_meta


@pytest.mark.parametrize("also_weakly_referenced", [False, True])
def test_a_view_that_only_a_variable_holds_is_named_in_the_report(
    also_weakly_referenced: bool,
) -> None:
    model = Tied("meta")
    weight, view = model.first.weight, model.first.weight[:2]
    reference = weakref.ref(weight) if also_weakly_referenced else None
    report = di.materialize(model, "cpu", seed=3)
    assert model.first.weight is weight
    assert view.is_meta
    assert reference is None or reference() is weight
    assert any(
        "`first.weight`: a view of it" in note and "stays without memory" in note
        for note in report.notes
    )


class Slotted(nn.Parameter):
    """Its objects cannot take over another class."""

    __slots__ = ("extra",)


class Replaces(nn.Module):
    """Its own init puts a parameter of another layout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        made = torch.ones(2, device=self.weight.device)
        self.weight = Slotted(made) if not made.is_meta else self.weight
        with torch.no_grad():
            self.weight.fill_(1)


def test_where_a_swap_is_impossible_every_holder_is_rebound_and_reported() -> None:
    model = Replaces()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema, by_name, held = [model.weight], {"w": model.weight}, model.weight

    def closure() -> torch.Tensor:
        return held

    report = di.materialize(
        model, "cpu", optimizers=optimizer, holders=[ema, by_name, closure]
    )
    assert report.ok
    assert type(model.weight) is Slotted
    assert model.weight is ema[0] is by_name["w"] is closure()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert report.rebound == ("weight",)
    assert any("rebound holders[0][0]" in note for note in report.notes)


def test_a_new_object_carries_over_what_the_old_one_carried() -> None:
    model = Replaces()
    model.weight.tag = "kept"
    di.materialize(model, "cpu")
    assert type(model.weight) is Slotted
    assert model.weight.tag == "kept"


def _fail(tensor: torch.Tensor) -> None:
    raise RuntimeError("too late")


def test_where_a_swap_is_impossible_a_failure_brings_back_the_old_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(Replaces(), nn.LayerNorm(2, device="meta"))
    weight = model[0].weight
    model.listed = [weight]
    monkeypatch.setattr(nn.init, "ones_", _fail)
    with pytest.raises(di.MaterializeError, match="too late"):
        di.materialize(model, "cpu")
    assert model[0].weight is weight is model.listed[0]
    assert weight.is_meta


class Wraps(Replaces):
    """Its own init wraps what it has in a new Parameter, and marks one with memory."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().fill_(1))
        if self.weight.device.type == "cpu":
            self.weight.mark = "made"


def test_marks_on_a_wrapped_parameter_stay() -> None:
    model = Wraps()
    weight = model.weight
    di.materialize(model, "cpu")
    assert model.weight is weight
    assert weight.mark == "made"


def test_marks_on_a_wrapped_parameter_are_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(Wraps(), nn.LayerNorm(2, device="meta"))
    weight = model[0].weight
    monkeypatch.setattr(nn.init, "ones_", _fail)
    with pytest.raises(di.MaterializeError, match="too late"):
        di.materialize(model, "cpu")
    assert model[0].weight is weight
    assert not hasattr(weight, "mark")


def test_dtype_casts_as_module_to_would_after_eager_construction() -> None:
    expected = _eager().to(torch.bfloat16)
    model = Tied("meta")
    weight = model.first.weight
    di.materialize(model, "cpu", seed=3, dtype=torch.bfloat16)
    _assert_equal(model, expected)
    assert model.first.weight is weight
    assert model.norm.num_batches_tracked.dtype is torch.int64


def test_by_name_gives_a_subset_the_values_of_the_whole() -> None:
    whole = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).to("meta")
    part = nn.ModuleDict({"b": nn.Linear(4, 4, device="meta")})
    state = torch.get_rng_state()
    di.materialize(whole, "cpu", seed=5, rng="by_name")
    di.materialize(part, "cpu", seed=5, rng="by_name")
    assert torch.equal(whole["b"].weight, part["b"].weight)
    assert torch.equal(whole["b"].bias, part["b"].bias)
    assert not torch.equal(whole["a"].weight, whole["b"].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_by_name_refuses_two_tensors_of_one_name() -> None:
    models = [nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")]
    with pytest.raises(di.PlanError, match="2 names stand for two different tensors"):
        di.materialize(models, "cpu", seed=0, rng="by_name")


def test_by_name_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        di.materialize(nn.Linear(2, 2, device="meta"), "cpu", rng="by_name")


@pytest.mark.parametrize("context", ["inference_mode", "no_grad", "autocast"])
def test_ambient_modes_change_nothing(context: str) -> None:
    expected = _eager()
    model = Tied("meta")
    contexts = {
        "inference_mode": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    }
    with contexts[context]:
        di.materialize(model, "cpu", seed=3)
    _assert_equal(model, expected)
    assert not model.first.weight.is_inference()
    assert model.first.weight.requires_grad


def test_a_plan_can_be_made_without_the_device_and_changes_nothing() -> None:
    model = Tied("meta")
    plan = di.plan(model, "cuda:5")
    expected = sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    )
    assert plan.final_bytes == expected
    assert all(param.is_meta for param in model.parameters())
    assert "Plan:" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 100
    assert plan.to_dict()["final_bytes"] == expected

"""User modules with init methods: what they fill is made, the rest refused by name."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def on_meta(kind: type[nn.Module], *args: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(*args)


def _with_method(name: str) -> type[nn.Module]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 3))
            self.register_buffer("table", torch.empty(4), persistent=False)
            getattr(self, name)()

    def fill(self: Any, scale: float = 0.5) -> None:
        nn.init.normal_(self.weight, std=scale)
        self.table.copy_(torch.arange(4.0))

    setattr(Model, name, fill)
    return Model


@pytest.mark.parametrize(
    "name", ["reset_parameters", "_reset_parameters", "init_weights", "_init_weights"]
)
def test_each_kind_of_init_method_is_run(name: str) -> None:
    kind = _with_method(name)
    torch.manual_seed(1)
    expected = kind()
    state = torch.get_rng_state()
    model = on_meta(kind)
    weight = model.weight
    di.materialize(model, "cpu", seed=1, verify="full")
    assert_equal(model, expected)
    assert model.weight is weight
    assert torch.equal(torch.get_rng_state(), state)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("inv_freq", torch.arange(3.0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_what_a_method_does_not_fill_is_refused_by_name_and_nothing_changes() -> None:
    model = on_meta(lambda: nn.ModuleDict({"rope": Rotary()}))  # type: ignore[arg-type]
    with pytest.raises(
        di.PlanError,
        match=(
            r"^1 tensor has no initializer: `rope.inv_freq` \(buffer of `Rotary`\)\. "
            r"Build the model inside `deferred_init\(...\)`, register an initializer "
            r"for `Rotary`"
        ),
    ):
        di.materialize(model, "cpu", seed=1)
    assert model["rope"].weight.is_meta


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(6, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for part in self.qkv.chunk(3):
                nn.init.xavier_uniform_(part)


def test_a_fused_weight_filled_slice_by_slice_is_made() -> None:
    torch.manual_seed(1)
    expected = Fused()
    model = on_meta(Fused)
    di.materialize(model, "cpu", seed=1, verify="full")
    assert_equal(model, expected)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].zero_()


class ReadsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.02)


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data = torch.empty(4, 3)


@pytest.mark.parametrize("kind", [Part, ReadsFirst, Empties])
def test_a_tensor_that_would_keep_garbage_is_not_claimed(
    kind: type[nn.Module],
) -> None:
    model = on_meta(kind)
    with pytest.raises(di.PlanError, match=r"`weight` \(parameter of"):
        di.materialize(model, "cpu", seed=1)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.randn(3, device=self.weight.device))
        self.bias.data = torch.full_like(self.bias, 2.0)
        self.calls = getattr(self, "calls", 0) + 1


def test_a_method_that_replaces_parameters_keeps_their_identity() -> None:
    torch.manual_seed(1)
    expected = Replaces()
    model = on_meta(Replaces)
    weight, bias = model.weight, model.bias
    di.materialize(model, "cpu", seed=1)
    assert_equal(model, expected)
    assert model.weight is weight
    assert model.bias is bias


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.names = ["a"]
        self.extra: dict[str, Any] = {}

    def reset_parameters(self) -> None:
        random.random()
        self.names.append("b")
        self.extra["w"] = self.weight
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.sum().item()
        raise ValueError("needs a config\nfile")


@pytest.mark.parametrize("kind", [Replaces, Raises])
def test_a_plan_leaves_the_module_and_the_generators_as_they_were(
    kind: type[nn.Module],
) -> None:
    model = on_meta(kind)
    before = dict(vars(model))
    tables = {k: dict(v) for k, v in before.items() if isinstance(v, dict)}
    states = torch.get_rng_state(), random.getstate()
    if kind is Raises:
        with pytest.raises(di.PlanError):
            di.plan(model, "cpu")
        assert model.names == ["a"]
    else:
        di.plan(model, "cpu")
    assert list(vars(model)) == list(before)
    for name, value in before.items():
        assert vars(model)[name] is value
        if isinstance(value, dict):
            assert list(value) == list(tables[name])
            assert all(value[k] is v for k, v in tables[name].items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_method_that_raises_without_memory_is_named_with_its_text() -> None:
    model = on_meta(Raises)
    with pytest.raises(
        di.PlanError,
        match=r"`Raises.reset_parameters` of `Raises` cannot be tried.*ValueError: "
        r"needs a config file.*deferred_init\(...\).*register an initializer",
    ):
        di.materialize(model, "cpu", seed=1)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.weight.sum().item() < 0:
            nn.init.zeros_(self.weight)


def test_a_method_that_reads_values_is_refused_with_the_reason() -> None:
    model = on_meta(DataDependent)
    with pytest.raises(di.PlanError, match=r"cannot be tried.*item\(\)"):
        di.materialize(model, "cpu", seed=1)


class Schedule(nn.Module):
    """Reads values of a temporary only, as drop-path schedules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        rates = [x.item() for x in torch.linspace(0, 1, 3)]
        nn.init.constant_(self.weight, rates[1])


def test_a_method_that_reads_values_of_a_temporary_is_run() -> None:
    model = on_meta(Schedule)
    di.materialize(model, "cpu", seed=1)
    assert model.weight.tolist() == [0.5, 0.5, 0.5]


def test_a_method_that_the_constructor_does_not_call_is_run_and_reported() -> None:
    model = on_meta(Schedule)
    report = di.materialize(model, "cpu", seed=1)
    assert any(
        "the constructor of Schedule gives the values that `reset_parameters` gives, "
        "though it does not call it" in text
        for text in report.assumptions
    )


class Block(nn.Module):
    def __init__(self, call: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        if call:
            self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.first.weight, std=0.1)
        with torch.no_grad():
            self.second.weight.mul_(0.5)


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def init_weights(self) -> None:
        nn.init.normal_(self.first.weight, std=0.1)


@pytest.mark.parametrize("kind", [Block, NeverCalled])
def test_a_composite_is_initialized_again_only_if_its_constructor_says_so(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(1)
    expected = kind()
    state = torch.get_rng_state()
    model = on_meta(kind)
    di.materialize(model, "cpu", seed=1)
    assert_equal(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_composite_leaves_loaded_tensors_of_its_children_alone() -> None:
    model = on_meta(Block)
    loaded = {"first.weight": torch.full((3, 3), 7.0)}
    model.load_state_dict(loaded, strict=False, assign=True)
    weight, version = model.first.weight, model.first.weight._version
    di.materialize(model, "cpu", seed=1)
    assert model.first.weight is weight
    assert weight._version == version
    assert weight.eq(7).all()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.empty(2))})
        self._setup()

    def _setup(self) -> None:
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in [*self.weights, *self.named.values()]:
            nn.init.normal_(weight)


def test_an_owner_fills_its_parameter_lists_and_dicts() -> None:
    torch.manual_seed(1)
    expected = Listed()
    model = on_meta(Listed)
    di.materialize(model, "cpu", seed=1, verify="full")
    assert_equal(model, expected)


class Applies(nn.Module):
    """The habit of many transformers: `self.apply(self._init_weights)`."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def test_an_applied_init_function_is_run_as_the_constructor_did() -> None:
    torch.manual_seed(1)
    expected = Applies()
    state = torch.get_rng_state()
    model = on_meta(Applies)
    report = di.materialize(model, "cpu", seed=1)
    assert_equal(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("Applies writes itself" in text for text in report.assumptions)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.lin.weight.data.normal_(std=0.02)


def test_a_constructor_that_writes_values_itself_is_reported() -> None:
    report = di.materialize(on_meta(Writes), "cpu", seed=1)
    assert any(
        "what the constructor of Writes writes itself (`data`, `normal_`)" in text
        for text in report.assumptions
    )


class Keeper(nn.Module):
    """Holds bound methods, tensors in lists, and a reference to its parent."""

    def __init__(self, parent: nn.Module | None = None) -> None:
        super().__init__()
        self.parent = [parent]
        self.weight = nn.Parameter(torch.empty(3))
        self.held = [self.weight]
        self.fill = self._fill
        self.reset_parameters()

    def _fill(self) -> None:
        nn.init.normal_(self.held[0])

    def reset_parameters(self) -> None:
        self.fill()


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.keeper = Keeper(self)


def test_methods_kept_in_attributes_and_references_to_parents_do_no_harm() -> None:
    torch.manual_seed(1)
    expected = Parent()
    model = on_meta(Parent)
    di.materialize(model, "cpu", seed=1)
    assert_equal(model, expected)
    assert model.keeper.held[0] is model.keeper.weight


_OUTSIDE = torch.zeros(3)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        _OUTSIDE.add_(1)
        nn.init.normal_(self.weight)


def test_a_method_that_writes_outside_of_its_module_is_refused_unrun() -> None:
    with pytest.raises(di.PlanError, match="writes to a tensor outside of the module"):
        di.materialize(on_meta(Outside), "cpu", seed=1)
    assert _OUTSIDE.eq(0).all()


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.empty(3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(3.0)


def test_a_plain_tensor_attribute_is_filled() -> None:
    model = on_meta(Attribute)
    scale: Tensor = model.scale
    di.materialize(model, "cpu")
    assert model.scale is scale
    assert scale.eq(3).all()


class Flagged(nn.Module):
    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.zero:
            nn.init.zeros_(self.table)


def test_modules_that_differ_in_a_flag_are_tried_apart() -> None:
    model = on_meta(lambda: nn.Sequential(Flagged(True), Flagged(False)))  # type: ignore[arg-type]
    with pytest.raises(di.PlanError, match=r"^1 tensor has no .*: `1.table`"):
        di.materialize(model, "cpu", seed=1)


def test_a_plan_keeps_no_model_alive() -> None:
    model = on_meta(Fused)
    reference = weakref.ref(model)
    di.plan(model, "cpu")
    del model
    gc.collect()
    assert reference() is None

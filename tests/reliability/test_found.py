"""What the laws found: the smallest input of each kind of fault, kept as a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init import workspace
from deferred_init.own_attributes import own_attribute
from deferred_init.rebind import exchange
from deferred_init.record.tensor import value_of
from deferred_init.reparametrized import is_parametrized, original_type
from deferred_init.undo import UndoLog
from tests.reliability.portrait import assert_equal, portrait, seed
from tests.reliability.trees import Program, Raising, build

PROGRAMS: dict[str, Program] = {
    "a tensor that a recorded parameter carries": (
        ("child", 0, 5, 1),
        ("mark", 0, 0, 0),
    ),
    "a tensor that a recorded buffer carries": (("look", 0, 0, 1), ("mark", 0, 0, 0)),
    "a live view of a parameter that was changed afterwards": (
        ("parameter", 0, 0, 1),
        ("live view", 0, 0, 0),
        ("change", 0, 0, 0),
    ),
    "a live view of a parameter that was drawn again": (
        ("parameter", 0, 0, 1),
        ("live view", 0, 0, 0),
        ("change", 0, 1, 0),
    ),
    "a module whose __getattr__ raises KeyError": (("child", 0, 1, 1),),
    "a module whose __getattr__ forwards": (("child", 0, 2, 1),),
    "an expanded tensor": (("parameter", 0, 8, 1), ("buffer", 0, 8, 1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rng", ["eager", "by_name"])
def test_a_fault_that_was_found_stays_mended(name: str, rng: str) -> None:
    seed()
    model = build(PROGRAMS[name])
    expected = portrait(model)
    seed()
    deferred = di.deferred_init(build, PROGRAMS[name])
    if rng == "by_name":
        di.materialize(deferred, "cpu", seed=0, rng="by_name", verify="full")
        assert portrait(deferred).keys() == expected.keys()
        return
    planned = di.plan(deferred, "cpu").final_bytes
    report = di.materialize(deferred, "cpu", verify="full")
    assert_equal(portrait(deferred), expected)
    held = {t.untyped_storage()._cdata: t for t in _tensors(deferred)}
    assert planned == report.final_bytes
    assert planned == sum(t.untyped_storage().nbytes() for t in held.values())


def _tensors(model: nn.Module) -> list[Tensor]:
    own = [*model.parameters(), *model.buffers()]
    attributes = [a for m in model.modules() for a in vars(m).values()]
    carried = [a for tensor in own for a in vars(tensor).values()]
    return own + [a for a in attributes + carried if isinstance(a, Tensor)]


def test_a_plan_and_an_audit_do_not_prolong_a_recording() -> None:
    model = di.deferred_init(nn.Linear, 2, 2)
    held = model.weight[:1]
    nodes = value_of(model.weight).recording.nodes
    length = len(nodes)
    for _ in range(3):
        di.plan(model, "cpu")
        di.audit(model, verify="full")
    assert len(nodes) == length
    del held


@pytest.mark.parametrize("first", ["materialize", "materialize_module"])
@pytest.mark.parametrize("order", [("base", "view"), ("view", "base")])
def test_parts_of_a_recording_that_share_memory_share_it_in_any_order(
    first: str, order: tuple[str, str]
) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"base": nn.Module(), "view": nn.Module()})
        model["base"].register_buffer("table", torch.rand(4))
        model["view"].register_buffer("window", model["base"].table[1:3])
        return model

    seed()
    expected = portrait(make())
    seed()
    model = di.deferred_init(make)
    if first == "materialize":
        di.materialize(model[order[0]], "cpu")
    else:
        di.materialize_module(model[order[0]])
    di.materialize(model[order[1]], "cpu")
    assert_equal(portrait(model), expected)


@pytest.mark.xfail(reason="known limit, see docs/reliability.md")
def test_a_live_view_is_no_leaf_if_its_parameter_was_made_before() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.inner = nn.Linear(2, 2)
        model.held = model.inner.weight[:1]
        return model

    model = di.deferred_init(make)
    di.materialize_module(model.inner)
    di.materialize(model, "cpu")
    assert torch.equal(model.held, model.inner.weight[:1])
    assert not model.held.is_leaf


def test_materialize_module_too_makes_what_a_tensor_carries() -> None:
    def make() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.main_grad = torch.ones(2, 2)
        return model

    model = di.deferred_init(make)
    di.materialize_module(model)
    assert model.weight.main_grad.tolist() == [[1, 1], [1, 1]]


def test_a_carried_tensor_on_meta_that_nobody_makes_is_refused_by_name() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.weight.main_grad = torch.empty(2, 2, device="meta")
    with pytest.raises(di.PlanError, match=r"`weight\.main_grad`"):
        di.materialize(model, "cpu")


def test_looking_at_a_module_never_asks_its_getattr() -> None:
    module = Raising()
    assert own_attribute(module, "parametrizations", 3) == 3
    assert own_attribute(module, "weight_sum") is None
    assert own_attribute(module, "training") is True
    assert own_attribute(module, "table") is module.table
    assert not is_parametrized(module)
    assert original_type(module) is Raising
    assert di.audit(module).ok


def test_a_module_in_a_plain_list_has_an_assumed_place_in_the_order() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.hidden = [nn.Linear(2, 2)]
        model.shown = nn.Linear(2, 2)
    report = di.materialize(model, "cpu", seed=0)
    assert report.assumptions == (
        "`hidden[0]`, which no module has registered, were constructed after the "
        "registered modules of the same owner",
    )


@pytest.mark.parametrize("part", ["bias", "parametrizations.weight.original1"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_shared_with_a_parametrized_module_is_made_once(
    part: str, dtype: torch.dtype | None
) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.norm = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        model.twin = nn.Parameter(model.norm.get_parameter(part).data)
        model.register_buffer("view", model.norm.get_parameter(part).detach()[:1])
        return model

    seed()
    eager = make() if dtype is None else make().to(dtype)
    expected = portrait(eager)
    with torch.device("meta"):
        model = make()
    assert di.materialize(model, "cpu", seed=0, dtype=dtype).ok
    assert_equal(portrait(model), expected)


def test_a_view_that_nobody_claims_is_cast_like_the_rest() -> None:
    def make() -> nn.Module:
        model = nn.Linear(2, 2)
        model.twin = nn.Parameter(model.bias.data)
        model.register_buffer("view", model.weight.detach()[:1])
        return model

    seed()
    expected = portrait(make().to(torch.bfloat16))
    with torch.device("meta"):
        model = make()
    assert di.materialize(model, "cpu", seed=0, dtype=torch.bfloat16).ok
    assert_equal(portrait(model), expected)


def test_what_a_parametrized_parameter_carries_on_meta_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        for parameter in model.parameters():
            parameter.main_grad = torch.empty_like(parameter)
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu")
    for name, _ in model.named_parameters():
        assert f"`{name}.main_grad`" in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def _after(function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        function(*args)
        raise error

    return wrapper


@pytest.mark.parametrize("make", ["meta", "recorded"])
def test_an_interrupt_right_after_a_swap_is_undone(
    make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make == "meta":
        model: nn.Module = nn.Linear(2, 2, device="meta")
    else:
        model = di.deferred_init(nn.Linear, 2, 2)
    before = portrait(model)
    with monkeypatch.context() as patched:
        patched.setattr(workspace, "exchange", _after(exchange, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            di.materialize(model, "cpu")
    assert_equal(portrait(model), before)
    assert di.materialize(model, "cpu").ok


def test_undoing_a_swap_that_did_not_happen_or_did_half_or_twice_does_no_harm() -> None:
    old, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    old.tag = "kept"
    logged: list[Callable[[], None]] = []
    undo = exchange(old, new, logged.append)
    assert logged == [undo]
    assert old.tolist() == [1, 1]
    undo()
    undo()
    assert (old.tolist(), new.tolist(), old.tag) == ([0, 0], [1, 1], "kept")
    torch._C._swap_tensor_impl(old, new)
    undo()
    assert (old.tolist(), new.tolist()) == ([0, 0], [1, 1])


def test_an_impatient_second_interrupt_does_not_stop_the_undoing() -> None:
    log, done = UndoLog(), []
    impatience = iter([KeyboardInterrupt(), KeyboardInterrupt()])

    def action() -> None:
        for error in impatience:
            raise error
        done.append("second")

    log.push(lambda: done.append("first"))
    log.push(action)
    assert log.rollback() == []
    assert done == ["second", "first"]


def test_an_undo_action_that_is_always_interrupted_is_given_up_and_reported() -> None:
    log, done = UndoLog(), []

    def action() -> None:
        raise KeyboardInterrupt

    log.push(lambda: done.append("first"))
    log.push(action)
    assert [type(error) for error in log.rollback()] == [KeyboardInterrupt]
    assert done == ["first"]


def test_a_view_whose_history_torch_refuses_is_looked_at() -> None:
    model = nn.Module()
    model.inner = di.deferred_init(nn.Linear, 2, 2)
    base = torch.zeros(4, requires_grad=True).clone()
    model.view = base.split(2)[0]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="multiple views"):
        _ = model.view.is_leaf
    di.materialize(model, "cpu", verify="full")
    assert di.audit(model, verify="full").ok

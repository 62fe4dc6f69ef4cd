"""Optimizers and other holders are checked, filled and rebound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deferred_init.holders import check_holders, rebind_holders
from deferred_init.inventory import take_inventory
from deferred_init.optimizer_state import fill_optimizer_state
from deferred_init.undo import UndoLog


def _model() -> nn.Linear:
    return nn.Linear(2, 2, device="meta")


def test_an_optimizer_of_another_model_is_a_problem() -> None:
    inventory = take_inventory([_model()])
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    (problem,) = check_holders(inventory, [stranger])
    assert "optimizers[0] (SGD) shares no parameter with the model" in problem
    assert "found none. Build it from `model.parameters()`" in problem


def test_deferred_parameters_of_a_second_model_are_a_problem() -> None:
    model, other = _model(), _model()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    (problem,) = check_holders(take_inventory([model]), [optimizer])
    assert "holds 2 deferred parameters that the model does not have" in problem
    assert "Pass their model as well" in problem
    assert check_holders(take_inventory([model, other]), [optimizer]) == []


def test_state_left_by_a_step_on_meta_is_a_problem() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.empty(1, 2, device="meta")).sum().backward()
    optimizer.step()
    (problem,) = check_holders(take_inventory([model]), [optimizer])
    assert "2 deferred state tensors" in problem
    assert "optimizer.state.clear()" in problem


def test_adagrad_state_is_made_with_its_initial_value_and_undone() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([param], initial_accumulator_value=0.5)
    deferred = torch.empty(3, device="meta")
    optimizer.state[param]["sum"] = deferred
    undo = UndoLog()
    assert fill_optimizer_state([optimizer], undo.push) == ["Adagrad.state[...]['sum']"]
    assert optimizer.state[param]["sum"].tolist() == [0.5, 0.5, 0.5]
    undo.rollback()
    assert optimizer.state[param]["sum"] is deferred


def test_optimizer_groups_state_and_nested_holders_follow_and_can_be_undone() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([old], lr=0.1, momentum=0.9)
    optimizer.state[old]["momentum_buffer"] = torch.ones(2)
    holder = {"list": [old], "object": nn.ParameterDict({"x": old})}
    undo = UndoLog()
    changed = rebind_holders({id(old): (old, new)}, [optimizer], [holder], undo.push)
    assert optimizer.param_groups[0]["params"][0] is new
    assert optimizer.state[new]["momentum_buffer"].tolist() == [1, 1]
    assert holder["list"][0] is new
    assert holder["object"]["x"] is new
    assert "optimizers[0].param_groups[0][0]" in changed
    assert "holders[0]['list'][0]" in changed
    undo.rollback()
    assert optimizer.param_groups[0]["params"][0] is old
    assert old in optimizer.state
    assert new not in optimizer.state
    assert holder["list"][0] is old
    assert holder["object"]["x"] is old


def test_keys_follow_in_their_order_and_can_be_undone() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    holder = {"a": 1, old: old, "b": {old: 2}, nn.ParameterList([old]): 3}
    before = list(holder.items())
    undo = UndoLog()
    changed = rebind_holders({id(old): (old, new)}, [], [holder], undo.push)
    assert "holders[0].keys()" in changed
    assert "holders[0]['b'].keys()" in changed
    (_, _), (key, value), (_, inner), (module, _) = holder.items()
    assert key is value is new
    assert next(iter(inner)) is next(module.parameters()) is new
    undo.rollback()
    for (key, value), (key_before, value_before) in zip(
        holder.items(), before, strict=True
    ):
        assert key is key_before
        assert value is value_before
    assert next(iter(holder["b"])) is next(module.parameters()) is old


def test_a_key_that_is_a_tuple_with_a_replaced_tensor_is_refused() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match=r"`holders\[0\].keys\(\)\[1\]` is an item of"):
        rebind_holders({id(old): (old, new)}, [], [{(1, old): 2}], UndoLog().push)


def test_a_closure_is_rebound() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))

    def make(weight: nn.Parameter):
        return lambda: weight

    read = make(old)
    assert rebind_holders({id(old): (old, new)}, [], [read], UndoLog().push)
    assert read() is new


def test_a_tuple_that_holds_a_replaced_tensor_is_refused() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match=r"`holders\[0\]\[0\]` is an item of a tuple"):
        rebind_holders({id(old): (old, new)}, [], [(old,)], UndoLog().push)


def test_parameters_that_became_one_are_stepped_once() -> None:
    first, second, new = (nn.Parameter(torch.full((2,), float(i))) for i in range(3))
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([first, other, second], lr=0.1)
    undo = UndoLog()
    replaced = {id(first): (first, new), id(second): (second, new)}
    rebind_holders(replaced, [optimizer], [], undo.push)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] in (
        [id(new), id(other)],
        [id(other), id(new)],
    )
    undo.rollback()
    assert [id(p) for p in group["params"]] == [id(first), id(other), id(second)]


def test_objects_and_what_their_closures_hold_are_rebound() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))

    class Shadow:
        def __init__(self) -> None:
            self.weight = old
            self.inner = {"again": [old]}

    def make():
        held = [old]
        if held:
            return lambda: (held, unset)
        unset = 1
        return None

    shadow, read = Shadow(), make()
    undo = UndoLog()
    changed = rebind_holders({id(old): (old, new)}, [], [shadow, read], undo.push)
    assert shadow.weight is new
    assert shadow.inner["again"][0] is new
    assert read.__closure__[0].cell_contents[0] is new
    assert changed == [
        "holders[0]['weight']",
        "holders[0]['inner']['again'][0]",
        "holders[1].__closure__[0]",
    ]
    undo.rollback()
    assert shadow.weight is old


def test_a_learning_rate_without_memory_comes_from_the_defaults() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    lost = torch.tensor(0.0, device="meta")
    optimizer.param_groups[0]["lr"] = lost
    undo = UndoLog()
    assert fill_optimizer_state([optimizer], undo.push) == [
        "SGD's 'lr', of its defaults"
    ]
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    undo.rollback()
    assert optimizer.param_groups[0]["lr"] is lost


def test_a_learning_rate_that_nothing_tells_is_a_problem() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    lost = torch.tensor(0.0, device="meta")
    optimizer.param_groups[0]["lr"] = lost
    inventory = take_inventory([model])
    assert check_holders(inventory, [optimizer]) == []
    optimizer.defaults["lr"] = lost
    (problem,) = check_holders(inventory, [optimizer])
    assert "optimizers[0] (SGD) has 1 options without memory (['lr'])" in problem
    assert "group['lr'] = torch.tensor(1e-3)" in problem
    optimizer.defaults["lr"] = "auto"
    assert len(check_holders(inventory, [optimizer])) == 1

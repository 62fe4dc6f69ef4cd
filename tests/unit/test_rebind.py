"""A swapped tensor stays the same object and keeps all that it carried."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from deferred_init.rebind import exchange, swap_obstacle


def _meta_parameter() -> nn.Parameter:
    return nn.Parameter(torch.empty(3, device="meta"))


def test_attributes_and_grad_flag_stay_with_the_object() -> None:
    param = _meta_parameter()
    param.tensor_model_parallel = True
    exchange(param, nn.Parameter(torch.ones(3)))
    assert param.tensor_model_parallel is True
    assert param.requires_grad
    assert isinstance(param, nn.Parameter)
    assert param.tolist() == [1, 1, 1]


def test_hooks_fire_after_the_exchange_and_their_handles_still_remove_them() -> None:
    param, seen = _meta_parameter(), []
    first = param.register_hook(lambda grad: grad * 2)
    second = param.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.tolist())
    )
    exchange(param, nn.Parameter(torch.ones(3)))
    param.sum().backward()
    assert seen == [[2, 2, 2]]
    first.remove()
    second.remove()
    param.grad = None
    param.sum().backward()
    assert seen == [[2, 2, 2]]
    assert param.grad.tolist() == [1, 1, 1]


def test_undo_gives_back_the_old_contents_attributes_and_hooks() -> None:
    param, seen = _meta_parameter(), []
    param.tag = "mine"
    param.register_hook(lambda grad: seen.append(grad.device.type))
    undo = exchange(param, nn.Parameter(torch.ones(3)))
    undo()
    assert param.is_meta
    assert param.tag == "mine"
    param.sum().backward()
    assert seen == ["meta"]


def test_attributes_of_the_new_tensor_win() -> None:
    param, new = _meta_parameter(), nn.Parameter(torch.ones(3))
    param.shared, new.shared = "old", "new"
    param.own = 1
    exchange(param, new)
    assert (param.shared, param.own) == ("new", 1)


class Slotted(torch.Tensor):
    """Keeps a part of itself in a slot, as DTensor does."""

    __slots__ = ("part",)
    part: str


def test_slots_of_a_class_go_with_the_contents_and_come_back() -> None:
    old, new = (torch.empty(2).as_subclass(Slotted) for _ in range(2))
    old.part, new.part = "old", "new"
    old.mark = 1  # type: ignore[attr-defined]
    undo = exchange(old, new)
    assert (old.part, new.part) == ("new", "old")
    assert old.mark == 1  # type: ignore[attr-defined]
    undo()
    undo()
    assert (old.part, new.part) == ("old", "new")


def test_a_slot_that_only_the_new_tensor_has_filled_is_taken_over() -> None:
    old, new = (torch.empty(2).as_subclass(Slotted) for _ in range(2))
    new.part = "new"
    undo = exchange(old, new)
    assert old.part == "new"
    undo()
    assert new.part == "new"


def test_weak_references_stay_right() -> None:
    param = _meta_parameter()
    reference = weakref.ref(param)
    exchange(param, nn.Parameter(torch.ones(3)))
    assert reference() is param
    assert reference().tolist() == [1, 1, 1]


def test_classes_that_cannot_be_exchanged_leave_both_as_they_were() -> None:
    class Slotted(nn.Parameter):
        __slots__ = ("extra",)

    param, new = _meta_parameter(), Slotted(torch.ones(3))
    with pytest.raises(TypeError):
        exchange(param, new)
    assert param.is_meta
    assert type(param) is nn.Parameter
    assert type(new) is Slotted


def test_a_weak_reference_is_an_obstacle() -> None:
    param = _meta_parameter()
    assert swap_obstacle(param) is None
    keep = weakref.ref(param)
    assert swap_obstacle(param) == "a weak reference to it exists"
    del keep
    assert swap_obstacle(param) is None


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_live_view_is_an_obstacle_unless_it_is_known(requires_grad: bool) -> None:
    tensor = torch.empty(4, device="meta", requires_grad=requires_grad)
    view = tensor[:2]
    reason = swap_obstacle(tensor)
    assert reason is not None
    assert "a view of it" in reason
    if not requires_grad:
        assert swap_obstacle(tensor, known_views=1) is None
    del view
    assert swap_obstacle(tensor) is None


def test_a_gradient_accumulated_on_meta_is_no_obstacle() -> None:
    param = _meta_parameter()
    (param * 2).sum().backward()
    assert swap_obstacle(param) is None
    exchange(param, nn.Parameter(torch.ones(3)))
    assert param.grad is None

"""Init code sees tensors of full size under a memory budget; only parts stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from backend import DEVICE
from lent_weights import Lent
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.errors import MaterializeError

Ranks = Callable[[int], RankPool]


def _ignore(_value: object) -> None: ...


def test_what_is_lent_looks_like_the_whole_and_takes_no_memory_yet() -> None:
    lent = Lent()
    with lent.staging:
        weight = lent.module["a"]
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (4, 3)
        assert weight.size(0) == 4
        assert weight.numel() == 12
        assert weight.device.type == "cpu"
        assert weight.dtype is torch.float32
        assert weight.requires_grad
        assert weight.is_leaf
        assert not weight.is_meta
        assert not lent.is_hot("a")
    assert weight.untyped_storage().nbytes() == 4


def test_a_part_of_what_is_written_is_kept_and_the_homes_come_back() -> None:
    lent = Lent()
    rows = lent.fill(lambda m: m["a"].copy_(torch.arange(12.0).view(4, 3)))
    assert rows == {"a": [0, 1, 2]}
    assert lent.module["a"] is lent.homes["a"]


def test_the_next_tensor_makes_the_one_before_cold_when_both_exceed_the_budget() -> (
    None
):
    lent = Lent(budget_bytes=95)

    def body(module: nn.ParameterDict) -> None:
        module["a"].fill_(1.0)
        assert lent.is_hot("a")
        module["b"].fill_(2.0)
        assert not lent.is_hot("a")
        assert lent.is_hot("b")

    assert lent.fill(body) == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_both_stay_hot_when_the_budget_allows_it() -> None:
    lent = Lent(budget_bytes=96)

    def body(module: nn.ParameterDict) -> None:
        module["a"].fill_(1.0)
        module["b"].fill_(2.0)
        module["a"].add_(module["b"])
        assert lent.is_hot("a")

    assert lent.fill(body) == {"a": [3, 3, 3], "b": [2, 2, 2]}
    assert lent.allocator.gathered == 0


def test_one_operation_on_two_tensors_has_both_even_beyond_the_budget() -> None:
    lent = Lent(budget_bytes=1)

    def body(module: nn.ParameterDict) -> None:
        module["b"].fill_(2.0)
        torch.add(module["b"], 1.0, out=module["a"])

    assert lent.fill(body) == {"a": [3, 3, 3], "b": [2, 2, 2]}


def test_a_view_that_is_still_held_keeps_its_tensor_hot() -> None:
    lent = Lent(budget_bytes=48)

    def body(module: nn.ParameterDict) -> None:
        view = module["a"].data
        module["b"].fill_(2.0)
        assert lent.is_hot("a")
        view.fill_(5.0)

    assert lent.fill(body) == {"a": [5, 5, 5], "b": [2, 2, 2]}


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda w: w.normal_(),
        lambda w: w.zero_(),
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.orthogonal_(tensor=w),
        lambda w: nn.init.constant_(w, 1.0),
        lambda w: nn.init.eye_(w),
        lambda w: w.data.normal_(),
        lambda w: w.detach().view(-1).copy_(torch.arange(12.0)),
    ],
)
def test_overwriting_needs_no_old_value(overwrite: Callable[[Tensor], None]) -> None:
    lent = Lent(stored=True)
    rows = lent.fill(lambda module: overwrite(module["a"]))
    assert lent.allocator.gathered == 0
    assert rows["a"] != [7, 7, 7]
    assert not any(value != value for value in rows["a"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.mul_(2.0), 14.0),
        (lambda w: w[1].zero_(), 7.0),
        (lambda w: w.data.add_(1.0), 8.0),
        (lambda w: torch._foreach_mul_([w], 3.0), 21.0),
        (lambda w: w.copy_(w + 1), 8.0),
    ],
)
def test_changing_a_value_that_was_made_before_gathers_it_first(
    change: Callable[[Tensor], None], expected: float
) -> None:
    lent = Lent(stored=True)
    rows = lent.fill(lambda module: change(module["a"]))
    assert lent.allocator.gathered == 1
    assert rows["a"] == [expected] * 3


def test_data_for_a_new_tensor_is_a_use() -> None:
    def body(module: nn.ParameterDict) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have it cloned
            module["b"].copy_(module["a"].new_tensor(module["a"]))

    rows = Lent(stored=True).fill(body)
    assert rows["b"] == [7, 7, 7]


def test_a_parameter_around_one_without_memory_is_told_from_others() -> None:
    lent = Lent(budget_bytes=48)

    def body(module: nn.ParameterDict) -> None:
        early = nn.Parameter(module["a"])
        module["a"].fill_(1.0)
        while_hot = nn.Parameter(module["a"])
        module["b"].fill_(2.0)
        late = nn.Parameter(module["b"])
        assert lent.staging.lacks_memory(early)
        assert not lent.staging.lacks_memory(while_hot)
        assert not lent.staging.lacks_memory(late)

    lent.fill(body)


class Wrapping(nn.Module):
    """Puts new Parameters around its own, before or after it fills them."""

    def __init__(self, wrapped_at: int) -> None:
        super().__init__()
        self.wrapped_at = wrapped_at
        self.first = nn.Parameter(torch.empty(4, 3))
        self.second = nn.Parameter(torch.empty(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        if self.wrapped_at == 1:
            self.first = nn.Parameter(self.first)
        nn.init.normal_(self.second)
        if self.wrapped_at == 2:
            self.first = nn.Parameter(self.first)


def _wrapping(_rank: int, wrapped_at: int) -> str:
    with torch.device("meta"):
        model = Wrapping(wrapped_at)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
    try:
        di.materialize(model, DEVICE, seed=3)
    except MaterializeError as error:
        return str(error)
    torch.manual_seed(3)
    with torch.device(DEVICE):
        expected = Wrapping(wrapped_at)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), getattr(expected, name)), name
    return "equal"


def test_a_parameter_that_is_wrapped_without_memory_is_refused_and_never_garbage(
    ranks: Ranks,
) -> None:
    assert ranks(2).run(_wrapping, 1) == ["equal", "equal"]
    for told in ranks(2).run(_wrapping, 2):
        assert "`first` was wrapped in a new Parameter while it was lent" in told
        assert "fill the Parameter that is there" in told


def test_a_write_that_no_mode_sees_fails_instead_of_being_lost() -> None:
    lent = Lent()
    with lent.staging:
        pass
    with torch.no_grad(), pytest.raises(RuntimeError, match="more than one element"):
        lent.module["a"].normal_()


def test_what_fits_into_the_budget_has_memory_without_being_watched() -> None:
    lent = Lent(hot=True)

    def body(module: nn.ParameterDict) -> None:
        assert not torch.overrides._is_torch_function_mode_enabled()
        module["a"].fill_(3.0)

    rows = lent.fill(body)
    assert rows["a"] == [3, 3, 3]
    assert all(value != value for value in rows["b"])  # untouched, and poisoned


def test_memory_that_init_code_keeps_hold_of_is_freed_all_the_same() -> None:
    lent = Lent(hot=True)
    kept: list[Tensor] = []
    lent.fill(lambda module: kept.append(module["a"]))
    assert kept[0].shape == (4, 3)
    assert kept[0].untyped_storage().nbytes() == 4
    assert lent.module["a"] is lent.homes["a"]


def test_a_value_that_was_only_looked_at_stays_as_it_is() -> None:
    lent = Lent(stored=True)
    rows = lent.fill(lambda module: _ignore(module["a"].view(-1)))
    assert rows == {"a": [7, 7, 7], "b": [7, 7, 7]}
    assert lent.allocator.gathered == 0


def test_fresh_memory_is_handed_to_the_poisoner() -> None:
    rows = Lent().fill(lambda module: module["a"].add_(0.0))
    assert all(value != value for value in rows["a"])


def test_an_assignment_to_data_is_taken_for_the_value() -> None:
    def body(module: nn.ParameterDict) -> None:
        module["a"].data = torch.full((4, 3), 9.0)

    assert Lent().fill(body) == {"a": [9, 9, 9]}


def test_an_attribute_that_init_code_sets_stays_on_the_parameter() -> None:
    lent = Lent()

    def body(module: nn.ParameterDict) -> None:
        module["a"].initialized = True

    lent.fill(body)
    assert lent.homes["a"].initialized is True

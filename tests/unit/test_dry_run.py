"""What counts as filled, merely written, or left raw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.dry_run import WriteWatch
from deferred_init.fresh_memory import PoisonedMemory
from deferred_init.poison import count_poison


def _meta(*size: int) -> Tensor:
    return torch.empty(*size, device="meta")


def test_one_overwriting_operation_fills_a_tensor() -> None:
    weight = nn.Parameter(_meta(3, 4))
    with torch.no_grad(), WriteWatch() as watch:
        nn.init.normal_(weight)
    assert watch.is_filled(weight)


def test_a_normal_fill_is_counted_and_refused_as_without_a_watch() -> None:
    weight, whole = _meta(3, 4), torch.empty(3, device="meta", dtype=torch.int64)
    with WriteWatch() as watch:
        assert weight.normal_(0.0, 0.02) is weight
        assert weight[:2].normal_().size() == (2, 4)
        with pytest.raises(RuntimeError, match="std"):
            weight.normal_(0.0, -1.0)
        with pytest.raises((RuntimeError, NotImplementedError)):
            whole.normal_()
    assert weight._version == 2
    assert watch.is_filled(weight)
    assert not watch.is_filled(whole)


def test_slices_that_cover_a_tensor_fill_it_and_others_do_not() -> None:
    rows, columns, part = _meta(4, 6), _meta(4, 6), _meta(4, 6)
    with WriteWatch() as watch:
        rows[:2].zero_()
        rows[2:].fill_(1.0)
        columns[:, :3].zero_()
        columns[:, 3:].normal_()
        part[1:].zero_()
    assert watch.is_filled(rows)
    assert watch.is_filled(columns)
    assert not watch.is_filled(part)
    assert storage_key(part) in watch.written


def test_operations_that_read_a_tensor_do_not_fill_it() -> None:
    weight = _meta(3)
    with WriteWatch() as watch:
        weight.mul_(2.0)
        weight.add_(1.0)
    assert storage_key(weight) in watch.written
    assert not watch.is_filled(weight)


def test_an_out_argument_is_filled() -> None:
    table = _meta(4)
    with WriteWatch() as watch:
        torch.arange(4.0, device="meta", out=table)
    assert watch.is_filled(table)


def test_memory_of_empty_is_raw_until_it_is_filled() -> None:
    with WriteWatch() as watch:
        raw, filled, made = _meta(2), _meta(2), torch.zeros(2, device="meta")
        filled.zero_()
    assert watch.is_raw(raw)
    assert not watch.is_raw(filled)
    assert not watch.is_raw(made)


def test_poisoned_memory_is_what_empty_and_its_kin_return() -> None:
    with PoisonedMemory():
        raw = [
            torch.empty(3),
            torch.empty_like(torch.zeros(3)),
            torch.zeros(2).new_empty(3),
        ]
        filled = torch.empty(3).zero_()
    assert [int(count_poison(tensor)) for tensor in raw] == [3, 3, 3]
    assert int(count_poison(filled)) == 0

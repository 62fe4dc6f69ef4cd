"""Indices that are lists or arrays, draws inside of `vmap`, nested tensors, formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deferred_init as di
from tests.record.conftest import Built

_INDICES: list[Any] = [
    [0, 2],
    [],
    [True, False, True, False],
    range(1, 3),
    np.array([0, 1]),
    np.array([True, False, False, True]),
    (slice(None), [0, 1]),
    ([0, 1], [1, 2]),
    (..., np.array([3, 0])),
    (slice(1, 3), [[0, 1], [2, 3]][0], None),
    True,
]


@pytest.mark.parametrize("index", _INDICES, ids=repr)
def test_an_index_that_is_no_tensor_is_used_as_in_eager(
    assert_eager_equals_deferred: Any, index: Any
) -> None:
    def body(self: Any) -> None:
        self.table = torch.rand(4, 4)
        self.rows = self.table[index]
        self.table[index] = 3
        self.given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        self.given[[1]] = torch.rand(2)

    assert_eager_equals_deferred(body)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_draws_inside_of_vmap_are_those_of_eager(
    assert_eager_equals_deferred: Any, randomness: str
) -> None:
    def member(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(3) + torch.rand(3) + torch.randint(0, 9, (3,))
        return x + drawn + torch.empty(3).fill_(2.0) + torch.zeros(3)

    def body(self: Any) -> None:
        self.members = torch.vmap(member, randomness=randomness)(torch.zeros(4, 3))
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)


def test_a_number_is_formatted_as_in_eager(assert_eager_equals_deferred: Any) -> None:
    def body(self: Any) -> None:
        table = torch.rand(3)
        self.text = f"{table[0]:.3f} {table.sum():5.1f}"
        self.register_buffer("table", table)

    made = assert_eager_equals_deferred(body)
    torch.manual_seed(0)
    table = torch.rand(3)
    assert made.text == f"{table[0]:.3f} {table.sum():5.1f}"
    with pytest.raises(TypeError, match="unsupported format string"):
        di.deferred_init(lambda: f"{torch.rand(3):.3f}")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_made_for_real_and_audited() -> None:
    def body(self: Any) -> None:
        rows = [torch.randn(2, 3), torch.randn(4, 3)]
        self.ragged = torch.nested.nested_tensor(rows)
        self.linear = nn.Linear(2, 2)

    torch.manual_seed(0)
    eager: Any = Built(body)
    torch.manual_seed(0)
    model: Any = di.deferred_init(Built, body)
    di.materialize(model, "cpu")
    assert di.audit(model).ok
    for one, other in zip(model.ragged, eager.ragged, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(model.linear.weight, eager.linear.weight)


def test_memory_that_there_is_not_cannot_be_shared() -> None:
    with pytest.raises(di.DeferredInitError, match=r"`share_memory_` at .*: mater"):
        di.deferred_init(lambda: nn.Linear(2, 2).share_memory())

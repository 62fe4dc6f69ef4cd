"""Which windows on one storage are the same, and which lie within another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.aliases import same_elements


def _window(**other: object) -> Tensor:
    block = torch.empty(8, device="meta")
    geometry = {"size": (2, 2), "stride": (2, 1), "storage_offset": 1, **other}
    window = block.as_strided(*geometry.values())  # type: ignore[arg-type]
    assert window.untyped_storage().nbytes() == 32
    return window


def test_windows_of_one_geometry_are_the_same_elements() -> None:
    assert same_elements(_window(), _window())


@pytest.mark.parametrize(
    "other", [{"size": (2, 1)}, {"stride": (1, 2)}, {"storage_offset": 2}]
)
def test_windows_of_another_geometry_are_not(other: dict[str, object]) -> None:
    assert not same_elements(_window(), _window(**other))


def test_windows_of_another_dtype_are_not() -> None:
    assert not same_elements(_window(), _window().view(torch.int32))


class Part(nn.Module):
    """Its init method fills a part of a buffer, under a name of its own."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4, device="meta"))
        self.register_buffer("part", self.table[start:stop])

    def reset_parameters(self) -> None:
        self.part.fill_(1)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 4), (1, 3)])
def test_what_lies_partly_within_filled_memory_is_not_made(
    start: int, stop: int
) -> None:
    with pytest.raises(di.PlanError, match="`table`"):
        di.materialize(Part(start, stop), "cpu")


def test_what_lies_wholly_within_filled_memory_is_made() -> None:
    model = Part(0, 4)
    di.materialize(model, "cpu")
    assert model.table.tolist() == [1, 1, 1, 1]

"""Poison: patterns that say that nobody wrote here."""

from __future__ import annotations

import pytest
import torch

from deferred_init.poison import count_poison, fill_poison, poison_left

CERTAIN = [
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int64",
    "uint64",
    "int32",
    "uint32",
    "bool",
    "complex64",
    "complex128",
]
WHOLE_ONLY = ["int8", "uint8", "int16", "uint16"]


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)])
def test_every_element_is_poisoned_and_counted(
    name: str, shape: tuple[int, ...]
) -> None:
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    assert fill_poison(tensor)
    assert poison_left(tensor) == tensor.numel()


@pytest.mark.parametrize("name", CERTAIN)
def test_what_was_written_no_longer_counts(name: str) -> None:
    tensor = torch.empty(3, 5, dtype=getattr(torch, name))
    fill_poison(tensor)
    written = torch.zeros(5, dtype=torch.uint8)
    if tensor.element_size() == 1:
        tensor[1].view(torch.uint8).copy_(written)
    else:
        tensor[1].copy_(written.to(tensor.dtype))
    assert poison_left(tensor) == 10


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_short_integers_count_only_where_nothing_was_written(name: str) -> None:
    tensor = torch.empty(6, dtype=getattr(torch, name))
    assert fill_poison(tensor)
    assert poison_left(tensor) == 6
    tensor.view(torch.int8)[0] = 0
    assert poison_left(tensor) == 0
    single = torch.empty(1, dtype=getattr(torch, name))
    fill_poison(single)
    assert poison_left(single) == 0


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_poison_of_floating_point_is_nan_so_that_it_spreads(name: str) -> None:
    tensor = torch.empty(4, dtype=getattr(torch, name))
    fill_poison(tensor)
    assert tensor.to(torch.float32).isnan().all()
    if tensor.element_size() > 1:
        assert poison_left(tensor * 0 + torch.nan) == 0 or tensor.dtype.itemsize == 2


def test_an_ordinary_nan_is_not_poison() -> None:
    assert poison_left(torch.full((4,), torch.nan)) == 0
    assert poison_left(torch.full((4,), torch.nan, dtype=torch.float64)) == 0
    assert poison_left(torch.full((4,), torch.nan, dtype=torch.bfloat16)) == 0


def test_strided_expanded_and_overlapping_memory_is_filled_within_its_bounds() -> None:
    block = torch.zeros(4, 6)
    fill_poison(block.t()[::2])
    assert poison_left(block) == 12
    expanded = torch.zeros(1).expand(5)
    assert fill_poison(expanded)
    assert poison_left(expanded) == 5
    windows = torch.zeros(6)
    fill_poison(windows.as_strided((4, 3), (1, 1)))
    assert poison_left(windows) == 6


def test_filling_leaves_gradients_alone() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    fill_poison(param)
    assert poison_left(param) == 3
    assert param.requires_grad
    assert param.is_leaf


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_what_cannot_be_poisoned_says_so(tensor: torch.Tensor) -> None:
    assert not fill_poison(tensor)
    assert count_poison(tensor) is None
    assert poison_left(tensor) == 0


def test_a_large_tensor_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deferred_init.poison._PART_ELEMENTS", 8)
    tensor = torch.empty(1, 5, 6)
    fill_poison(tensor)
    tensor[0, 2].zero_()
    assert poison_left(tensor) == 24

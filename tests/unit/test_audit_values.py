"""Values that cannot be meant are found in tensors of any size and kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di


def _found(model: nn.Module) -> list[tuple[str, str]]:
    report = di.audit(model, verify="full")
    return [(finding.code, finding.fqn) for finding in report.findings]


class Holder(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (10, 4), (3, 2, 7)])
def test_a_value_in_any_part_of_a_large_tensor_is_found(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deferred_init.poison._PART_ELEMENTS", 8)
    for position in range(int(torch.Size(shape).numel())):
        tensor = torch.ones(shape)
        assert _found(Holder(tensor.clone())) == []
        tensor.view(-1)[position] = float("nan" if position % 2 else "inf")
        assert _found(Holder(tensor)) == [("not-finite", "weight")]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_in_eight_bits_is_found(dtype: torch.dtype) -> None:
    """As memory that nobody wrote, from which it cannot be told apart."""
    tensor = torch.ones(4)
    assert _found(Holder(tensor.to(dtype))) == []
    tensor[2] = float("nan")
    assert _found(Holder(tensor.to(dtype))) == [("poison-left", "weight")]


def test_a_padding_row_in_eight_bits_has_to_be_zero() -> None:
    layer = nn.Embedding(3, 4, padding_idx=1)
    layer.weight = nn.Parameter(
        layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    assert _found(layer) == []
    wrong = torch.ones(3, 4).to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(wrong, requires_grad=False)
    assert _found(layer) == [("padding-row", "weight")]


def test_a_padding_index_out_of_range_is_left_to_the_forward() -> None:
    layer = nn.Embedding(3, 4, padding_idx=1)
    layer.padding_idx = 7
    assert _found(layer) == []

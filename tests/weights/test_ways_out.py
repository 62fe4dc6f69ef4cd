"""A refused checkpoint says what to do next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di


def _refusal(weights: Any) -> str:
    model = di.deferred_init(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", weights=weights)
    return str(caught.value)


def _stored() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return dict(model.state_dict())


def test_two_models_in_one_file_are_both_named() -> None:
    """A suggestion that names the averages only would load those unseen."""
    text = _refusal({"model": {"module": _stored()}, "ema": _stored()})
    assert "Without the prefix `ema.` 7 of 7 would match" in text
    assert "So would they without `model.module.`: choose by what it holds" in text


def test_a_single_prefix_has_no_rival() -> None:
    assert "So would they" not in _refusal({"model": _stored()})


def test_a_transposed_weight_is_recognized() -> None:
    text = _refusal({**_stored(), "0.weight": torch.zeros(2, 3)})
    assert text.endswith("if it is transposed, pass a `Transpose` in `names`")
    assert "transposed" not in _refusal({**_stored(), "0.weight": torch.zeros(3, 4)})


def test_a_dtype_that_cannot_be_cast_says_where_to_convert_it() -> None:
    text = _refusal({**_stored(), "1.num_batches_tracked": torch.tensor(3.0)})
    assert "torch.float32 in the checkpoint: convert it there first" in text


def test_numpy_arrays_are_not_left_out_in_silence() -> None:
    text = _refusal({**_stored(), "0.bias": torch.zeros(3).numpy()})
    assert "1 values are numpy arrays, expected tensors: `0.bias`" in text
    assert "torch.from_numpy" in text
    text = _refusal({"model": {**_stored(), "0.bias": torch.zeros(3).numpy()}})
    assert "1 values are numpy arrays, expected tensors: `model.0.bias`" in text

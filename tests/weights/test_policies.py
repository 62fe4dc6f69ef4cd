"""What a checkpoint lacks, has too much, or has in another shape or dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deferred_init as di
from tests.behaviour.equal_models import on_meta
from tests.weights.small_models import everything, stack


def test_all_mismatched_shapes_are_listed_with_both_shapes() -> None:
    model = on_meta(stack)
    weights = {key: torch.zeros(3, 2) for key in model.state_dict()}
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", weights=weights)
    assert len(caught.value.problems) == 8
    assert (
        "`1.bias` has shape (4,) in the model, but (3, 2) in the checkpoint (`1.bias`)"
        in caught.value.problems
    )
    assert str(caught.value).startswith("8 problems; nothing was changed:")
    assert all(tensor.is_meta for tensor in everything(model).values())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.int64, torch.float32),
        (torch.float32, torch.int64),
        (torch.int64, torch.int32),
        (torch.int8, torch.uint8),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.bool, torch.int64),
    ],
)
def test_a_dtype_that_would_lose_its_meaning_is_an_error(
    stored: torch.dtype, wanted: torch.dtype
) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(3, dtype=wanted, device="meta"))
    weights = {"x": torch.zeros(3, dtype=stored)}
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", weights=weights)
    expected = f"`x` is {wanted} in the model, but {stored} in the checkpoint: "
    assert str(caught.value) == f"{expected}convert it there first (`x`)"


def test_eight_bit_floats_are_not_cast_because_their_scales_would_be_lost() -> None:
    model = nn.Linear(3, 2, bias=False, device="meta")
    weights = {"weight": torch.zeros(2, 3).to(torch.float8_e4m3fn)}
    with pytest.raises(di.PlanError, match="8-bit floats go with scales, which a cast"):
        di.materialize(model, "cpu", weights=weights)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.int32, torch.int64),
        (torch.uint8, torch.int16),
        (torch.uint8, torch.bool),
        (torch.float64, torch.float16),
    ],
)
def test_a_dtype_that_holds_the_values_is_cast_to(
    stored: torch.dtype, wanted: torch.dtype
) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(3, dtype=wanted, device="meta"))
    values = torch.tensor([0, 1, 1], dtype=stored)
    di.materialize(model, "cpu", weights={"x": values})
    assert torch.equal(model.x, values.to(wanted))


def test_missing_error_lists_what_the_checkpoint_lacks() -> None:
    model = on_meta(stack)
    weights = {
        key: value for key, value in stack().state_dict().items() if "3" not in key
    }
    text = "lacks 2 of 8 tensors: `3.weight`, `3.bias`. Pass missing='init'"
    with pytest.raises(di.PlanError, match=text):
        di.materialize(model, "cpu", weights=weights, missing="error")
    assert model[0].weight.is_meta


def test_unexpected_error_lists_what_the_model_lacks() -> None:
    model = on_meta(lambda: stack(2))
    weights = dict(stack(3).state_dict())
    text = "2 of 6 keys are not in the model: `2.bias`, `2.weight`. Pass unexpected="
    with pytest.raises(di.PlanError, match=text):
        di.materialize(model, "cpu", weights=weights, unexpected="error")
    report = di.materialize(model, "cpu", weights=weights)
    assert any("2 of 6 keys are not in the model" in note for note in report.notes)


def test_all_problems_are_reported_at_once() -> None:
    model = on_meta(lambda: stack(2))
    weights = {
        "0.weight": torch.zeros(9, 9),
        "0.bias": torch.zeros(4, dtype=torch.int64),
        "other": torch.zeros(1),
    }
    with pytest.raises(di.PlanError) as caught:
        di.materialize(
            model, "cpu", weights=weights, missing="error", unexpected="error"
        )
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        (
            "model.",
            r"Without the prefix `model.` 8 of 8 would match: pass "
            r"names={r'^model\.': ''}",
        ),
        ("a.b.", r"Without the prefix `a.b.` 8 of 8 would match"),
    ],
)
def test_a_file_of_other_names_is_refused_with_the_prefix_that_would_match(
    prefix: str, hint: str
) -> None:
    state = dict(stack().state_dict())
    weights = {prefix + key: value for key, value in state.items()}
    model = on_meta(stack)
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", weights=weights)
    assert "lacks 8 of 8 tensors, most of the model" in str(caught.value)
    assert hint in str(caught.value)
    names = {"^" + prefix.replace(".", r"\."): ""}
    di.materialize(model, "cpu", weights=weights, names=names, missing="error")
    assert torch.equal(model[3].weight, state["3.weight"])


def test_a_file_without_the_prefix_of_the_model_is_refused_with_it() -> None:
    model = nn.ModuleDict({"model": on_meta(stack)})
    weights = dict(stack().state_dict())
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu", weights=weights)
    hint = (
        "With the prefix `model.` put before them, 8 of 8 would match: pass "
        "names={'^': 'model.'}"
    )
    assert hint in str(caught.value)
    di.materialize(
        model, "cpu", weights=weights, names={"^": "model."}, missing="error"
    )
    assert torch.equal(model["model"][0].weight, weights["0.weight"])


def test_one_shard_of_several_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    """Three quarters of the model would silently be random."""
    state = dict(stack().state_dict())
    shard = tmp_path / "model-00001-of-00004.safetensors"
    save_file({key: state[key] for key in ("0.weight", "0.bias")}, shard)
    model = on_meta(stack)
    with pytest.raises(di.PlanError, match="lacks 6 of 8 tensors, most of the model"):
        di.materialize(model, "cpu", weights=shard)
    report = di.materialize(model, "cpu", weights=shard, missing="any")
    assert report.ok
    assert torch.equal(model[0].weight, state["0.weight"])


def test_what_has_memory_already_is_left_alone_and_noted() -> None:
    model = on_meta(stack)
    real = nn.Linear(4, 4)
    before = real.weight.detach().clone()
    model[1] = real
    report = di.materialize(model, "cpu", weights=dict(stack().state_dict()))
    assert model[1].weight is real.weight
    assert torch.equal(real.weight, before)
    assert any(
        "2 tensors have memory already and were left alone" in note
        and "`1.weight`, `1.bias`" in note
        for note in report.notes
    )


def test_extra_state_is_neither_missing_nor_unexpected() -> None:
    class WithState(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.zeros(4, dtype=torch.uint8)

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("saved states differ in size and are not loaded")

    for stored in (None, torch.zeros(2322, dtype=torch.uint8)):
        model = WithState(3, 2, device="meta")
        weights: dict[str, Any] = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
        if stored is not None:
            weights["_extra_state"] = stored
        report = di.materialize(
            model, "cpu", weights=weights, missing="error", unexpected="error"
        )
        assert report.ok
        noted = any("1 entries of extra state" in note for note in report.notes)
        assert noted == (stored is not None)


def test_policies_and_weights_of_the_wrong_kind_are_refused() -> None:
    model = on_meta(stack)
    with pytest.raises(ValueError, match=r"missing must be one of \('init', 'error', "):
        di.materialize(model, "cpu", weights={}, missing="ignore")
    with pytest.raises(ValueError, match=r"unexpected must be one of \('ignore', "):
        di.materialize(model, "cpu", weights={}, unexpected="init")
    with pytest.raises(TypeError, match="expected a path, an address, a mapping of "):
        di.materialize(model, "cpu", weights=7)


# -- the law: eager construction, then load_state_dict ------------------------------

"""FP8 weights given as `weights=` are what `load_state_dict` makes of them.

Checkpoints are those of models that were trained, so that no fresh scale fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from te_checkpoints import (
    FP8,
    MODELS,
    eager,
    from_meta,
    optimizer_of,
    train_on,
    two_modules,
)
from te_models import RECIPES, build, same
from torch import Tensor, nn

import deferred_init as di
from deferred_init.te.probe import is_quantized

pytest.importorskip("transformer_engine.pytorch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.te,
    # torch and TE warn at each other's lines of storages and single processes.
    pytest.mark.filterwarnings("ignore"),
]


def _trained(kind: str, te_recipe: Any) -> nn.Module:
    model = from_meta(kind, te_recipe, sharded=False)(0)
    train_on(model, optimizer_of(model), te_recipe, range(2))
    return model


def _weights_of(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {k: v for k, v in state.items() if not k.endswith("_extra_state")}


def _given_as(form: str, state: dict[str, Any], folder: Path) -> Any:
    if form == "dcp":
        dcp.save(dict(state), checkpoint_id=folder)
        return folder
    if form == "on the host":
        torch.save(state, folder / "w.pt")
        return torch.load(folder / "w.pt", map_location="cpu", weights_only=True)
    return state


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.dequantize() if is_quantized(tensor) else tensor.clone()


@pytest.mark.parametrize("form", ["mapping", "on the host", "dcp"])
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("kind", MODELS)
def test_fp8_weights_are_loaded_as_load_state_dict_does_it(
    kind: str, recipe: str, form: str, tmp_path: Path
) -> None:
    te_recipe = RECIPES[recipe]()
    trained = _trained(kind, te_recipe)
    state = _weights_of(trained)
    twin = eager(kind, te_recipe, sharded=False)(1)
    twin.load_state_dict(state, strict=False)
    model = build(lambda: MODELS[kind]("meta"), te_recipe)
    report = di.materialize(
        model,
        "cuda",
        weights=_given_as(form, state, tmp_path),
        missing="error",
        unexpected="error",
        seed=1,
    )
    assert report.ok
    params = dict(model.named_parameters())
    assert any(is_quantized(param) for param in params.values())
    for name, expected in twin.named_parameters():
        assert same(params[name], expected), name
    for name, stored in trained.named_parameters():
        assert torch.equal(_values(params[name]), _values(stored)), name


@pytest.mark.parametrize("form", ["mapping", "dcp"])
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_fp8_weights_of_another_recipe_are_quantized_anew_and_noted(
    recipe: str, form: str, tmp_path: Path
) -> None:
    te_recipe = RECIPES[recipe]()
    state = _weights_of(_trained("modules", RECIPES["current"]()))
    twin = eager("modules", te_recipe, sharded=False)(1)
    twin.load_state_dict(state, strict=False)
    model = build(lambda: two_modules("meta"), te_recipe)
    weights = _given_as(form, state, tmp_path)
    report = di.materialize(model, "cuda", weights=weights, missing="error", seed=1)
    params = dict(model.named_parameters())
    for name, expected in twin.named_parameters():
        assert same(params[name], expected), name
    # Delayed and current scaling store one format, with a scale of whatever origin.
    noted = any("`1.weight` is stored as Float8Tensor" in n for n in report.notes)
    assert noted == (recipe == "block")


@pytest.mark.parametrize("form", ["mapping", "on the host", "dcp"])
@pytest.mark.parametrize("recipe", FP8)
def test_fp8_weights_fill_a_model_in_high_precision_with_their_values(
    recipe: str, form: str, tmp_path: Path
) -> None:
    trained = _trained("modules", RECIPES[recipe]())
    weights = _given_as(form, _weights_of(trained), tmp_path)
    model = two_modules("meta")
    di.materialize(model, "cuda", weights=weights, missing="error")
    for mine, stored in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, _values(stored))


def test_safetensors_has_no_place_for_fp8_weights_but_for_their_values(
    tmp_path: Path,
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    te_recipe = RECIPES["current"]()
    state = _weights_of(_trained("modules", te_recipe))
    with pytest.raises(Exception, match=r"(?i)invalid|storage|pointer"):
        save_file(state, tmp_path / "quantized.safetensors")
    values = {name: _values(value) for name, value in state.items()}
    folder = tmp_path / "values"
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    model = build(lambda: two_modules("meta"), te_recipe)
    di.materialize(model, "cuda", weights=folder, missing="error", seed=1)
    twin = eager("modules", te_recipe, sharded=False)(1)
    twin.load_state_dict(values, strict=False)
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert same(mine, expected)

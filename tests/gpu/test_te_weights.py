"""Quantized weights: recipes, exclusions, column-wise data, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from te_models import BF16, RECIPES, WIDTH, assert_same_parameters, autocast, same
from torch import nn

import deferred_init as di
from deferred_init.te.probe import is_quantized

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.te]
PRESETS = {"delayed": "fp8_delayed", "current": "fp8_current", "block": "fp8_block"}


def _model(device: str) -> nn.Module:
    return nn.Sequential(
        te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device, params_dtype=BF16),
        te.Linear(WIDTH, WIDTH, device=device, params_dtype=BF16),
        te.GroupedLinear(2, WIDTH, WIDTH, device=device, params_dtype=BF16),
        te.ops.Sequential(
            te.ops.Linear(WIDTH, WIDTH, device=device, dtype=BF16),
            te.ops.GroupedLinear(2, WIDTH, WIDTH, device=device, dtype=BF16),
        ),
    )


@pytest.mark.parametrize("kind", PRESETS)
def test_a_recipe_quantizes_what_was_built_in_high_precision(kind: str) -> None:
    recipe = di.Recipe.load(PRESETS[kind])
    model = _model("meta")
    di.materialize(model, "cuda", recipe, seed=0, verify="full")
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=recipe.make_te_recipe()):
        twin = _model("cuda")
    assert_same_parameters(model, twin)


def test_modules_named_in_the_recipe_stay_in_high_precision() -> None:
    recipe = di.Recipe(
        name="test",
        te_recipe=di.Recipe.load("fp8_current").te_recipe,
        quantize_weights=True,
        high_precision_modules=("1", "3.0"),
    )
    with te.quantized_model_init(enabled=True, recipe=recipe.make_te_recipe()):
        model = _model("meta")
    di.materialize(model, "cuda", recipe, seed=0)
    plain = {
        name for name, param in model.named_parameters() if type(param) is nn.Parameter
    }
    assert {"1.weight", "3.0.weight", "3.0.basic_ops.0.weight"} & plain == {
        "1.weight",
        "3.0.weight",
    }
    assert "2.weight0" not in plain
    with autocast(recipe.make_te_recipe()):
        model[1](torch.ones(32, WIDTH, device="cuda", dtype=BF16)).sum().backward()


@pytest.mark.parametrize("kind", PRESETS)
def test_column_wise_data_exist_also_under_no_grad(kind: str) -> None:
    with torch.no_grad():
        model = _model("meta")
        di.materialize(model, "cuda", PRESETS[kind], seed=0, verify="full")
    twin = _model("meta")
    di.materialize(twin, "cuda", PRESETS[kind], seed=0)
    assert_same_parameters(model, twin)


def test_an_inference_recipe_makes_row_wise_data_only() -> None:
    recipe = di.Recipe(
        name="test",
        te_recipe=di.Recipe.load("fp8_block").te_recipe,
        quantize_weights=True,
        inference=True,
    )
    model = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=BF16)
    report = di.materialize(model, "cuda", recipe, seed=0)
    assert report.ok
    assert model.weight._columnwise_data is None


def test_the_audit_finds_weights_without_column_wise_data() -> None:
    te_recipe = RECIPES["block"]()
    with torch.no_grad(), te.quantized_model_init(enabled=True, recipe=te_recipe):
        model = te.Linear(WIDTH, WIDTH, params_dtype=BF16)
    codes = {finding.code for finding in di.audit(model).findings}
    assert codes == {"te-columnwise-missing"}


def test_the_audit_finds_stale_column_wise_data() -> None:
    model = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=BF16)
    di.materialize(model, "cuda", "fp8_block", seed=0)
    assert di.audit(model, verify="full").ok
    model.weight._columnwise_data.zero_()
    codes = {finding.code for finding in di.audit(model, verify="full").findings}
    assert "te-columnwise-stale" in codes


def test_the_audit_finds_a_quantizer_of_another_recipe() -> None:
    model = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=BF16)
    di.materialize(model, "cuda", "fp8_current", seed=0)
    other = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=BF16)
    di.materialize(other, "cuda", "fp8_block", seed=0)
    model.quantizers = other.quantizers
    codes = {finding.code for finding in di.audit(model).findings}
    assert "te-quantizer-mismatch" in codes


def test_high_precision_values_are_kept_on_the_final_parameter() -> None:
    te_recipe = RECIPES["current"]()

    def make(device: str) -> Any:
        with te.quantized_model_init(
            enabled=True, recipe=te_recipe, preserve_high_precision_init_val=True
        ):
            return te.Linear(WIDTH, WIDTH, device=device, params_dtype=BF16)

    model = make("meta")
    weight = model.weight
    di.materialize(model, "cuda", seed=0)
    assert model.weight is weight
    torch.manual_seed(0)
    twin = make("cuda")
    kept = weight.get_high_precision_init_val()
    assert torch.equal(kept, twin.weight.get_high_precision_init_val())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None


def test_ops_say_that_they_have_no_place_for_values_from_before_quantization() -> None:
    recipe = di.Recipe(
        name="test",
        te_recipe=di.Recipe.load("fp8_current").te_recipe,
        quantize_weights=True,
        keep_high_precision_init=True,
    )
    model = te.ops.Sequential(te.ops.BasicLinear(WIDTH, WIDTH, device="meta"))
    report = di.materialize(model, "cuda", recipe, seed=0)
    told = "`0`: Transformer Engine's ops do not keep the values from before"
    assert any(note.startswith(told) for note in report.notes)
    with te.quantized_model_init(
        recipe=RECIPES["current"](), preserve_high_precision_init_val=True
    ):
        twin = te.ops.BasicLinear(WIDTH, WIDTH, device="cuda")
    for weight in (model[0].weight, twin.weight):
        assert is_quantized(weight)
        assert not hasattr(weight, "_high_precision_init_val")


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0),
    reason="this GPU has MXFP8 and NVFP4",
)
@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4"])
def test_formats_that_the_gpu_lacks_are_refused_in_the_plan(preset: str) -> None:
    model = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=BF16)
    with pytest.raises(di.PlanError, match="needs compute capability 10"):
        di.materialize(model, "cuda", preset)
    assert model.weight.is_meta


def test_frozen_flags_attributes_and_hooks_survive_quantization() -> None:
    model = _model("meta")
    calls: list[int] = []
    weight = model[1].weight
    weight.requires_grad_(False)
    weight.mine = "kept"
    model[1].bias.register_hook(lambda grad: calls.append(1))
    model[0].fc1_weight.register_post_accumulate_grad_hook(lambda p: calls.append(2))
    di.materialize(model, "cuda", "fp8_current", seed=0)
    assert model[1].weight is weight
    assert not weight.requires_grad
    assert weight.mine == "kept"
    x = torch.randn(32, WIDTH, device="cuda", dtype=BF16)
    with autocast(RECIPES["current"]()):
        model[1](model[0](x)).sum().backward()
    assert sorted(calls) == [1, 2]


def test_peak_memory_is_the_final_size_and_one_tensor_in_high_precision() -> None:
    wide = 2048

    def make() -> nn.Module:
        return nn.Sequential(
            *(
                te.LayerNormMLP(wide, 4 * wide, device="meta", params_dtype=BF16)
                for _ in range(4)
            )
        )

    di.materialize(make(), "cuda", "fp8_current", seed=0)  # workspaces of the process
    model = make()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    di.materialize(model, "cuda", "fp8_current", seed=0)
    final = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    largest = 2 * 4 * wide * wide
    # The FP8 copies of the tensor being made are part of the final size.
    assert peak <= final + 1.1 * largest, (peak, final, largest)


def test_a_loaded_weight_is_left_alone_and_the_stream_is_as_in_eager() -> None:
    def make(device: str) -> nn.Module:
        return nn.Sequential(
            te.LayerNormMLP(WIDTH, WIDTH, device=device, params_dtype=BF16),
            te.Linear(WIDTH, WIDTH, device=device, params_dtype=BF16),
        )

    model = make("meta")
    loaded = nn.Parameter(torch.full((WIDTH, WIDTH), 2.0, device="cuda", dtype=BF16))
    model[0].fc1_weight = loaded
    di.materialize(model, "cuda", seed=0)
    torch.manual_seed(0)
    twin = make("cuda")
    assert model[0].fc1_weight is loaded
    assert bool((loaded == 2.0).all())
    assert same(model[0].fc2_weight, twin[0].fc2_weight)
    assert same(model[1].weight, twin[1].weight)

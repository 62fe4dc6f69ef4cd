"""The recipe state that modules and ops of Transformer Engine keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import te_needs

import deferred_init as di

pytestmark = pytest.mark.te


@te_needs("current scaling without memory")
def test_recipe_state_of_the_same_class_with_other_settings_is_built_anew(
    te: Any,
) -> None:
    """TE itself keeps the old quantizers unless the class of the recipe changes."""
    from transformer_engine.common.recipe import Float8CurrentScaling, Format

    from deferred_init.te.quantization import Choice
    from deferred_init.te.recipe_state import set_up_module, set_up_op

    first = Float8CurrentScaling(fp8_format=Format.HYBRID)
    second = Float8CurrentScaling(fp8_format=Format.E4M3)
    with di.on_meta(), te.quantized_model_init(recipe=first):
        op, module = te.ops.BasicLinear(32, 32), te.Linear(32, 32)
    choice = Choice(
        quantized=True,
        built_quantized=True,
        te_recipe=second,
        own=False,
        keep_high_precision=False,
        inference=False,
    )
    e4m3 = op._quantizers["forward"][0].dtype
    assert op._quantizers["backward"][0].dtype != e4m3
    set_up_op(op, choice, stale=False)
    assert op._quantizers["backward"][0].dtype == e4m3
    assert module.fp8_meta["recipe"] is first
    set_up_module(module, choice, stale=False)
    assert module.fp8_meta["recipe"] is second
    assert module.quantizers["scaling_bwd"][0].dtype == e4m3


def test_an_op_that_lost_its_recipe_in_a_forward_needs_one(te: Any) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    with di.on_meta(), te.quantized_model_init(recipe=Float8CurrentScaling()):
        op = te.ops.BasicLinear(32, 32)
    op.reset_recipe_state(recipe=None)  # as a first forward outside of `autocast`
    with pytest.raises(di.PlanError, match="holds no recipe any more"):
        di.plan(op, "cuda", gpu="h200")
    planned = di.plan(op, "cuda", "fp8_current", gpu="h200")
    assert planned.forecast().tensors[0].stored_as.startswith("Float8CurrentScaling")


def test_scales_on_another_device_than_the_one_asked_for_are_noticed(te: Any) -> None:
    """They are allocated where the current device was, whatever the module's is."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    from deferred_init.te.recipe_state import is_stale

    state = DelayedScalingRecipeState(
        DelayedScaling(), mode="forward", num_quantizers=2, device=torch.device("cpu")
    )
    here, there = torch.device("cpu"), torch.device("cuda", 1)
    for metas in ({"scaling_fwd": state}, {"forward": {"scaling_fwd": state}}):
        assert not is_stale(metas, (), here)
        assert is_stale(metas, (), there)
    assert not is_stale(None, (), there)


def test_a_model_of_a_custom_recipe_is_planned_with_its_own_quantizers(te: Any) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine_torch import DType

    def quantizer(role: Any) -> Any:
        cpu = torch.device("cpu")
        return te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, cpu)

    with di.on_meta(), te.quantized_model_init(recipe=CustomRecipe(qfactory=quantizer)):
        model = torch.nn.Sequential(te.Linear(32, 32), te.ops.BasicLinear(32, 32))
    planned = di.plan(model, "cuda", gpu="h200").forecast().tensors
    stored = {each.fqn: each.stored_as for each in planned}
    assert (
        stored["0.weight"]
        == stored["1.weight"]
        == ("CustomRecipe, row- and column-wise")
    )

"""What constructors of Transformer Engine do besides making parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_capabilities import has, te_needs
from torch import Tensor, nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = pytest.mark.te


def test_warming_up_is_left_out(bare_te: Any) -> None:
    """With these sizes constructors allocate, and compile, on the GPU."""
    te = bare_te
    sizes = {"seq_length": 4, "micro_batch_size": 2}
    with on_meta():
        model = nn.ModuleList(
            [
                te.LayerNormMLP(8, 16, **sizes),
                te.TransformerLayer(16, 16, 2, **sizes),
                te.ops.Sequential(
                    te.ops.L2Normalization(**sizes), te.ops.BasicLinear(8, 8)
                ),
            ]
        )
    assert all(param.is_meta for param in model.parameters())
    from transformer_engine.pytorch.module import layernorm_mlp

    assert layernorm_mlp.warmup_jit_bias_gelu_all_dtypes.__module__.startswith(
        "transformer_engine"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("DelayedScaling", "Float8CurrentScaling"),
        pytest.param("Float8BlockScaling", marks=te_needs("block-scaled ops")),
        *("MXFP8BlockScaling", "NVFP4BlockScaling"),
    ],
)
def test_models_with_quantized_weights_are_built_without_memory_or_a_gpu(
    bare_te: Any, name: str
) -> None:
    from transformer_engine.common import recipe as te_recipes

    te_recipe = getattr(te_recipes, name)()
    with on_meta(), bare_te.quantized_model_init(enabled=True, recipe=te_recipe):
        model = nn.Sequential(bare_te.Linear(32, 32), bare_te.ops.BasicLinear(32, 32))
    assert all(param.is_meta for param in model.parameters())
    plan = di.plan(model, "cuda", gpu="b200")
    stored = [
        each.stored_as for each in plan.forecast().tensors if "weight" in each.fqn
    ]
    assert len(stored) == 2
    assert all(str(text).startswith(name) for text in stored), stored


def test_no_cache_of_the_process_is_left_with_a_tensor_without_memory(
    bare_te: Any,
) -> None:
    from transformer_engine.common.recipe import NVFP4BlockScaling

    te = bare_te
    grouped = has("ops.GroupedLinear")
    with on_meta(), te.quantized_model_init(enabled=True, recipe=NVFP4BlockScaling()):
        nn.ModuleList(
            [
                te.TransformerLayer(
                    16, 16, 2, softmax_type="learnable", fuse_qkv_params=True
                ),
                *((te.ops.GroupedLinear(2, 16, 16),) if grouped else ()),
                te.DotProductAttention(2, 8, softmax_type="off-by-one"),
            ]
        )
    assert [name for name, value in _globals() if value.is_meta] == []
    from transformer_engine.pytorch.tensor import nvfp4_tensor

    if not torch.cuda.is_available():
        assert nvfp4_tensor.get_rht_matrix.cache_info().currsize == 0


def _globals() -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that Transformer Engine keeps for the whole process."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformer_engine"):
            continue
        for key, value in list(vars(module).items()):
            parts: list[Any] = [value]
            if isinstance(value, dict):
                parts = list(value.values())
            elif isinstance(value, (list, tuple)):
                parts = list(value)
            for part in parts:
                if isinstance(part, Tensor):
                    yield f"{name}.{key}", part


def test_ops_without_parameters_need_nothing(te: Any) -> None:
    ops = te.ops
    made = [
        *(ops.Identity(), ops.Reshape((-1, 8)), ops.ConstantScale(2.0)),
        *(ops.Dropout(0.1), ops.L2Normalization(), ops.AddExtraInput()),
        *(ops.MakeExtraOutput(), ops.Quantize(), ops.GELU(), ops.ReLU(), ops.SiLU()),
        *(ops.GEGLU(), ops.SwiGLU(), ops.ClampedSwiGLU()),
    ]
    model = ops.Sequential(*made, ops.BasicLinear(8, 8, device="meta"))
    assert di.materialize(model, "cpu", seed=0).ok
    torch.manual_seed(0)
    twin = ops.BasicLinear(8, 8, device="cpu")
    assert torch.equal(model[-1].weight, twin.weight)


@te_needs("locked channels")
def test_no_fuser_is_built_on_the_side(te: Any) -> None:
    """Building one locks the channels of its ops, for good."""
    model = te.ops.Sequential(
        te.ops.BasicLinear(8, 8, device="meta"), te.ops.MakeExtraOutput()
    )
    di.materialize(model, "cpu", seed=0)
    assert di.audit(model, verify="full").ok
    assert model._module_groups is None
    assert not any(op._extra_tensor_channels_locked for op in model)


def test_the_state_dict_of_a_fresh_model_needs_no_gpu(bare_te: Any) -> None:
    with on_meta():
        model = nn.Sequential(
            bare_te.Linear(8, 8), bare_te.ops.Linear(8, 8), bare_te.LayerNorm(8)
        )
    di.materialize(model, "cpu", seed=0)
    state = model.state_dict()
    assert not any(v.is_meta for v in state.values() if isinstance(v, Tensor))
    assert {k for k in state if k.startswith("1.") and "extra" not in k} == {
        "1.basic_ops.0.weight",
        "1.basic_ops.1.bias",
    }


def test_values_loaded_after_materialization_reach_both_names_of_a_parameter(
    te: Any,
) -> None:
    linear = te.ops.Linear(4, 4, device="meta")
    di.materialize(linear, "cpu", seed=0)
    state = {k: torch.full_like(v, 3.0) for k, v in linear.state_dict().items()}
    linear.load_state_dict(state)
    assert linear.weight is linear.basic_ops[0].weight
    assert bool((linear.weight == 3).all())


@pytest.mark.parametrize("fused", [True, False])
def test_frequencies_that_were_sent_to_meta_later_are_made_again(
    te: Any, fused: bool
) -> None:
    """As `init_empty_weights(include_buffers=True)` or `.to("meta")` do."""
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

    made: list[Tensor] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("cpu"):
                exponents = torch.arange(0, 16, 2, dtype=torch.float32) / 16
                made.append(1.0 / (10000.0**exponents))
            with on_meta():
                self.rope = RotaryPositionEmbedding(16)

    model = Model()
    if fused:  # its construction is known; else it is told by the buffer's size
        model = model.to("meta")
    else:
        from deferred_init.te import constructed

        constructed._rotary_dims.pop(model.rope)
    report = di.materialize(model, "cpu")
    assert torch.equal(model.rope.inv_freq, made[0])
    assert any("even number" in text for text in report.assumptions) is not fused


def test_whole_layers_are_planned_on_a_machine_without_a_gpu(bare_te: Any) -> None:
    with on_meta():
        model = bare_te.TransformerLayer(16, 32, 2, softmax_type="learnable")
    plan = di.plan(model, "cuda", gpu="h200")
    made = {slot.fqn for step in plan.steps for slot in step.claim.slots}
    assert {name for name, _ in model.named_parameters()} <= made
    assert all(param.is_meta for param in model.parameters())

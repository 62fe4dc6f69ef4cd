"""Loading into Transformer Engine's modules and ops, as far as a CPU can show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import Tensor, nn

import deferred_init as di
from deferred_init.sources import Fuse, Stack, Unstack


def build(te: Any) -> nn.Module:
    return nn.Sequential(
        te.Linear(16, 32, device="meta"),
        te.LayerNormMLP(32, 64, device="meta"),
        te.ops.Sequential(te.ops.Linear(32, 16, device="meta")),
    )


def stored(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


def test_values_come_from_the_checkpoint_and_the_rest_from_the_modules(te: Any) -> None:
    model = build(te)
    held = dict(model.named_parameters())
    weights = stored(model)
    report = di.materialize(
        model, "cpu", weights=weights, missing="error", unexpected="error"
    )
    assert report.ok
    for name, param in model.named_parameters():
        assert param is held[name]
        assert torch.equal(param, weights[name]), name
    linear: Any = model[2][0]
    assert linear.weight is linear.basic_ops[0].weight
    # Tensor-parallel attributes are set by the module's own method only.
    assert hasattr(model[0].weight, "tensor_model_parallel")


def test_extra_state_is_not_missing_and_that_of_another_size_is_tolerated(
    te: Any,
) -> None:
    model = build(te)
    weights = stored(model)
    weights["0._extra_state"] = torch.zeros(2322, dtype=torch.uint8)
    report = di.materialize(
        model, "cpu", weights=weights, missing="error", unexpected="error"
    )
    assert any("1 entries of extra state were not read" in n for n in report.notes)


def test_what_is_missing_is_made_as_without_weights(te: Any) -> None:
    alone = build(te)
    di.materialize(alone, "cpu", seed=6)
    model = build(te)
    weights = stored(model)
    del weights["1.fc1_weight"], weights["0.bias"]
    di.materialize(model, "cpu", weights=weights, seed=6)
    assert torch.equal(model[1].fc1_weight, alone[1].fc1_weight)
    assert torch.equal(model[0].bias, torch.zeros(32))
    assert torch.equal(model[1].fc2_weight, weights["1.fc2_weight"])


def test_a_plan_counts_the_high_precision_values_of_quantized_weights(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(te)
    weights = stored(model)
    monkeypatch.undo()  # the plan is made on the machine as it is
    plain = di.plan(model, "cuda", "bf16", weights=weights)
    quantized = di.plan(model, "cuda", "fp8_current", weights=weights)
    matrices = sum(v.numel() * 4 for k, v in weights.items() if v.ndim == 2)
    assert quantized.scratch_bytes >= plain.scratch_bytes + matrices
    assert quantized.steps[-1].initializer.name == "checkpoint"
    assert len(quantized.steps[-1].claim.rewrites) == len(weights)


def test_gate_and_up_projections_are_joined_into_fc1(te: Any) -> None:
    """As Llama's checkpoints have them, for a gated activation."""
    model = te.LayerNormMLP(
        8, 12, activation="swiglu", normalization="RMSNorm", bias=False, device="meta"
    )
    gate, up = torch.randn(12, 8), torch.randn(12, 8)
    weights = {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": torch.randn(8, 12),
        "norm.weight": torch.randn(8),
    }
    names = [
        {r"^mlp\.down_proj\.weight$": "fc2_weight", r"^norm\.": "layer_norm_"},
        Fuse("fc1_weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    ]
    di.materialize(
        model, "cpu", weights=weights, names=names, missing="error", unexpected="error"
    )
    assert torch.equal(model.fc1_weight, torch.cat([gate, up]))


@te_needs("ops.GroupedLinear")
def test_experts_stored_in_one_tensor_fill_a_grouped_layer(te: Any) -> None:
    model = te.ops.GroupedLinear(3, 8, 16, bias=False, device="meta")
    experts = torch.randn(3, 16, 8)
    rule = Unstack(r"experts\.w1", "weight{index}")
    names = [n for n, _ in model.named_parameters()]
    if names == ["weight"]:  # a release that keeps all experts in one parameter
        di.materialize(
            model,
            "cpu",
            weights={f"e{i}": e for i, e in enumerate(experts)},
            names=[Stack("weight", "e{index}")],
        )
        assert torch.equal(model.weight, experts)
        return
    di.materialize(model, "cpu", weights={"experts.w1": experts}, names=[rule])
    for index in range(3):
        assert torch.equal(getattr(model, f"weight{index}"), experts[index])


@te_needs("joined weights")
@pytest.mark.parametrize("kind", ["module", "op"])
def test_what_becomes_part_of_one_parameter_is_refused_in_the_plan(
    te: Any, kind: str
) -> None:
    cls = te.GroupedLinear if kind == "module" else te.ops.GroupedLinear
    model = nn.Sequential(cls(2, 16, 16, device="meta", single_grouped_weight=True))
    weights = stored(model)
    text = (
        r"2 tensors become part of one Parameter, into which nothing can be loaded: "
        r"`0\.weight0`, `0\.weight1`\. Build the layer with single_grouped_weight=False"
    )
    with pytest.raises(di.PlanError, match=text):
        di.materialize(model, "cpu", weights=weights)
    assert all(param.is_meta for param in model.parameters())
    # What keeps a Parameter of its own can be loaded, and the rest is initialized.
    biases = {name: values for name, values in weights.items() if "bias" in name}
    assert len(biases) == 2
    assert di.materialize(model, "cpu", weights=biases, missing="any").ok
    for name, values in biases.items():
        assert torch.equal(model.get_parameter(name), values)


@te_needs("joined weights")
def test_joined_parameters_take_their_weights_after_materialize(te: Any) -> None:
    model = te.GroupedLinear(2, 16, 16, device="meta", single_grouped_weight=True)
    weights = stored(model)
    di.materialize(model, "cpu")
    model.load_state_dict(weights, strict=False)
    parts = model.weight.rowwise_data.view(2, 16, 16)
    assert torch.equal(parts, torch.stack([weights["weight0"], weights["weight1"]]))

"""What a plan predicts against what the GPU then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.te]

WIDE = 2048
BF16 = torch.bfloat16
ALLOCATION = 512  # CUDA's caching allocator rounds up to this


def _te_model() -> nn.Module:
    return nn.Sequential(
        *(
            te.TransformerLayer(
                WIDE,
                4 * WIDE,
                16,
                fuse_qkv_params=True,
                device="meta",
                params_dtype=BF16,
            )
            for _ in range(4)
        )
    )


def _hf_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDE,
        intermediate_size=4 * WIDE,
        num_hidden_layers=4,
        num_attention_heads=16,
        vocab_size=32000,
    )
    model: Any = di.deferred_init(transformers.LlamaForCausalLM, config)
    return model


def _bytes_held(model: nn.Module) -> int:
    """Bytes of all tensors, those inside of quantized ones as well."""
    seen: dict[int, int] = {}

    def add(tensor: Any) -> None:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        quantized = hasattr(tensor, "get_metadata")
        if quantized:
            for part in tensor.get_metadata().values():
                if isinstance(part, torch.Tensor):
                    add(part)
        elif flatten is not None and type(tensor) not in (torch.Tensor, nn.Parameter):
            for name in flatten()[0]:
                add(getattr(tensor, name))
        else:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()

    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            add(tensor)
    return sum(seen.values())


@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (_te_model, None),
        (_te_model, "fp8_current"),
        (_te_model, "fp8_delayed"),
        (_te_model, "fp8_block"),
        (_hf_model, None),
        (_hf_model, "bf16"),
    ],
    ids=["te", "te-current", "te-delayed", "te-block", "hf", "hf-bf16"],
)
def test_final_bytes_are_exact_and_the_peak_is_within_two_per_cent(
    build: Any, recipe: str | None
) -> None:
    di.materialize(build(), "cuda", recipe, seed=0)  # workspaces of the process
    torch.cuda.empty_cache()
    model = build()
    planned = di.plan(model, "cuda", recipe)
    report = di.materialize(model, "cuda", recipe, seed=0)
    assert planned.final_bytes == report.final_bytes == _bytes_held(model)
    assert report.peak_bytes is not None
    rounding = ALLOCATION * 4 * len(planned.forecast().tensors)
    predicted = planned.forecast().peak_bytes
    assert abs(predicted - report.peak_bytes) <= 0.02 * report.peak_bytes + rounding

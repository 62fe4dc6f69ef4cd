"""The models of the construction benchmarks, and how each can be spelt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from llama import llama_config
from torch import nn

BF16 = torch.bfloat16
RECIPES = {
    "bf16": None,
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder: its library, and its sizes."""

    library: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int = 0


SHAPES = {
    "gpt2": Shape(
        library="hf-gpt2",
        layers=12,
        hidden=768,
        inner=3072,
        heads=12,
        kv_heads=12,
        vocabulary=50257,
    ),
    "llama-1b": Shape(
        library="hf-llama",
        layers=16,
        hidden=2048,
        inner=8192,
        heads=32,
        kv_heads=8,
        vocabulary=128256,
    ),
    "llama-8b": Shape(
        library="hf-llama",
        layers=32,
        hidden=4096,
        inner=14336,
        heads=32,
        kv_heads=8,
        vocabulary=128256,
    ),
    "te-1b": Shape(
        library="te", layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8
    ),
    "te-16": Shape(
        library="te", layers=16, hidden=4096, inner=14336, heads=32, kv_heads=8
    ),
    "te-32": Shape(
        library="te", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8
    ),
    "tiny": Shape(
        library="hf-llama",
        layers=2,
        hidden=64,
        inner=128,
        heads=4,
        kv_heads=2,
        vocabulary=256,
    ),
    "te-tiny": Shape(library="te", layers=2, hidden=64, inner=128, heads=4, kv_heads=2),
}


def hugging_face(shape: Shape) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers in BF16."""
    import transformers

    config: Any
    if shape.library == "hf-gpt2":
        config = transformers.GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            vocab_size=shape.vocabulary,
        )
    else:
        config = llama_config(shape)

    def build() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=BF16
        )
        return model

    return build


def transformer_engine(shape: Shape, device: str) -> nn.Module:
    """Build a stack of TE's layers in BF16, without embedding and head."""
    import transformer_engine.pytorch as te

    return nn.Sequential(
        *(
            te.TransformerLayer(
                shape.hidden,
                shape.inner,
                shape.heads,
                num_gqa_groups=shape.kv_heads,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                params_dtype=BF16,
                device=device,
            )
            for _ in range(shape.layers)
        )
    )


def te_recipe_of(name: str) -> Any:
    """Make TE's recipe of one of our presets; None for `bf16`."""
    from transformer_engine.common import recipe

    kind = RECIPES[name]
    return None if kind is None else getattr(recipe, kind)()


def stored_as(name: str) -> AbstractContextManager[Any]:
    """The context in which TE builds weights that are stored in a recipe's format."""
    import transformer_engine.pytorch as te

    te_recipe = te_recipe_of(name)
    if te_recipe is None:
        return nullcontext()
    found: AbstractContextManager[Any] = te.quantized_model_init(
        enabled=True, recipe=te_recipe
    )
    return found


def computes_in(name: str) -> AbstractContextManager[Any]:
    """The context in which TE computes with a recipe."""
    import transformer_engine.pytorch as te

    te_recipe = te_recipe_of(name)
    if te_recipe is None:
        return nullcontext()
    found: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=te_recipe)
    return found

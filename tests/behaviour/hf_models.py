"""Small Hugging Face models: eager, on meta, loaded, materialized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import torch
import transformers as hf
from torch import Tensor, nn

import deferred_init as di
from tests.behaviour.equal_models import on_meta

Build = Callable[[], nn.Module]

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _vision_language() -> hf.PreTrainedConfig:
    return hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_IMAGE),
        text_config=hf.LlamaConfig(**_GROUPED),
        image_token_id=90,
    )


CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "gpt2": lambda: hf.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=97,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": lambda: hf.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "mistral": lambda: hf.MistralConfig(**_GROUPED),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GROUPED, head_dim=8),
    "mixtral": lambda: hf.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
    "mamba": lambda: hf.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=97, state_size=4
    ),
    "bert": lambda: hf.BertConfig(**_TEXT),
    "t5": lambda: hf.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=97
    ),
    "bart": lambda: hf.BartConfig(**_SEQ2SEQ),
    "vit": lambda: hf.ViTConfig(**_IMAGE),
    "swin": lambda: hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    "dinov2": lambda: hf.Dinov2Config(**_IMAGE),
    "clip": lambda: hf.CLIPConfig(
        text_config={**_TEXT, "projection_dim": 16},
        vision_config={**_IMAGE, "projection_dim": 16},
        projection_dim=16,
    ),
    "whisper": lambda: hf.WhisperConfig(
        **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"},
        max_source_positions=32,
        max_target_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        begin_suppress_tokens=None,
    ),
    "wav2vec2": lambda: hf.Wav2Vec2Config(
        **{k: v for k, v in _TEXT.items() if k != "max_position_embeddings"},
        conv_dim=(32, 32),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    "llava": _vision_language,
}
CAUSAL = ("gpt2", "llama", "mistral", "gemma3", "mixtral", "mamba")


def builder(name: str) -> Build:
    """Return a function that builds a model, with a head where it is a causal one."""
    config = CONFIGS[name]()
    auto = hf.AutoModelForCausalLM if name in CAUSAL else hf.AutoModel

    def build() -> nn.Module:
        model: nn.Module = auto.from_config(copy.deepcopy(config))
        return model

    return build


def _empty(build: Build, include_buffers: bool) -> nn.Module:
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        return build()


WAYS: dict[str, Callable[[Build], nn.Module]] = {
    "torch.device": on_meta,
    "init_empty_weights": lambda build: _empty(build, False),
    "init_empty_weights with buffers": lambda build: _empty(build, True),
    "to meta": lambda build: build().to("meta"),
    "deepcopy": lambda build: copy.deepcopy(on_meta(build)),
}


def eager(build: Build, seed: int = 5) -> tuple[nn.Module, Tensor]:
    """Build on the CPU; return the model and the generator's final state."""
    torch.manual_seed(seed)
    return build(), torch.get_rng_state()


def loaded(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a model on meta into which a state dict was assigned, and its source."""
    expected, _ = eager(builder(name), seed=9)
    model = on_meta(builder(name))
    state = copy.deepcopy(expected.state_dict())
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model, expected


def materialized(build: Build, **options: Any) -> nn.Module:
    model = on_meta(build)
    di.materialize(model, "cpu", seed=5, **options)
    return model

"""Every Hugging Face architecture, small enough to build eagerly on a CPU.

`iter_cases()` yields `(name, build, kind)` for each architecture that `AutoModel`
(`kind="base"`) or `AutoModelForCausalLM` (`kind="causal"`) knows and that a small
config is known for. Other benchmarks and tests may use it; `zoo_meta.py` does.

[Note: How configs are shrunk]
A default config describes a model of up to hundreds of gigabytes. Sizes are reduced
by name, with one value map for all widths, so that widths which have to agree
between two sub-configs still agree. Which reduction an architecture accepts cannot
be known, so several are tried, strongest first, on the meta device, and the first
that builds within `MAX_PARAMETERS` is taken. The choice is remembered in
`zoo_choices.json`; `python benchmarks/zoo_configs.py` makes that file anew.
"""

from __future__ import annotations

import copy
import inspect
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

MAX_PARAMETERS = 12_000_000
LEVELS = tuple(range(7))
VOCAB = 160
CHOICES = Path(__file__).with_name("zoo_choices.json")

Case = tuple[str, Callable[[], nn.Module], str]

_WIDTHS = (
    "hidden_size", "intermediate_size", "d_model", "ffn_dim", "encoder_ffn_dim",
    "decoder_ffn_dim", "projection_dim", "out_hidden_size", "moe_intermediate_size",
    "embedding_size", "embed_dim", "n_embd", "d_ff", "hidden_dim", "mlp_dim",
    "decoder_hidden_size", "encoder_hidden_size", "text_hidden_size", "dim",
    "decoder_intermediate_size", "encoder_intermediate_size", "output_hidden_size",
    "shared_expert_intermediate_size", "projector_hidden_size", "fpn_hidden_size",
    "pooler_output_size", "encoder_hidden_dim", "ffn_hidden_size", "emb_dim",
    "word_embed_proj_dim", "projection_hidden_dim", "embedding_dim", "n_inner",
    "encoder_linear_units", "decoder_linear_units", "moe_hidden_size",
    "intermediate_size_mlp", "audio_hidden_size", "image_text_hidden_size",
    "dim_feedforward", "encoder_feedforward_dim", "dense_intermediate_size",
    "shared_intermediate_size", "backbone_hidden_size", "fusion_hidden_size",
    "projection_intermediate_size", "expert_ffn_hidden_size", "dff", "dim_ff",
    "t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim", "speech_encoder_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
    "mask_feature_size", "pooler_hidden_size", "neck_hidden_size", "width",
    "mamba_d_ssm", "lru_width", "attention_hidden_size", "cross_hidden_size",
    "adapter_out_dim", "depth_hidden_size", "ple_embed_dim", "d_inner",
)  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "encoder_layers", "decoder_layers", "depth", "num_layers",
    "n_layer", "n_layers", "layers", "num_decoder_layers", "num_encoder_layers",
    "decoder_num_hidden_layers", "conf_num_hidden_layers", "decoder_num_layers",
    "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers",
    "num_blocks", "encoder_num_hidden_layers", "depth_num_hidden_layers",
    "num_block_layers", "n_recurrent_layers", "num_spatial_layers",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads",
    "decoder_cross_attention_heads", "t2u_encoder_attention_heads",
    "t2u_decoder_attention_heads", "speech_encoder_attention_heads",
    "decoder_num_attention_heads", "cross_num_attention_heads",
)  # fmt: skip
_KV_HEADS = (
    "num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "n_head_kv",
    "cross_num_key_value_heads", "decoder_num_key_value_heads",
)  # fmt: skip
_HEAD_DIMS = ("head_dim", "d_kv", "swa_head_dim", "cross_head_dim", "kv_channels")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_source_positions",
    "max_target_positions", "num_position_embeddings", "max_sequence_length",
)  # fmt: skip
_IMAGES = ("image_size", "img_size", "pretrain_image_size")
_LISTS = ("depths", "num_block_repeats", "blocks_per_stage")
# (names, from this level on not reduced any more, how)
_LIMITS: tuple[tuple[tuple[str, ...], int, Callable[[int], int]], ...] = (
    (_LAYERS, 5, lambda value: min(value, 2)),
    (_EXPERTS, 4, lambda value: min(value, 4)),
    (_TOP_K, 4, lambda value: min(value, 2)),
    (_POSITIONS, 4, lambda value: min(value, 256)),
    (_IMAGES, 2, lambda value: min(value, 64)),
    (_WIDTHS, 3, lambda value: _width(value)),
    (_HEADS, 3, lambda value: min(value, 4)),
    (_KV_HEADS, 1, lambda value: min(value, 2)),
    (_KV_HEADS, 3, lambda value: min(value, 4)),
    (_HEAD_DIMS, 2, lambda value: min(value, 16)),
    (_WIDTHS, 4, lambda value: value // 4 if value > 256 else value),
)


def _width(value: int) -> int:
    """One map for all widths; monotone, so equal stays equal."""
    if value <= 64:
        return value
    if value <= 512:
        return 32
    return 64 if value <= 2560 else 128


def _shrunk(name: str, value: Any, level: int) -> Any:
    """The smaller value for one field, or the value itself."""
    if name in _LISTS and isinstance(value, (list, tuple)) and level < 4:
        return type(value)(1 for _ in value)
    if type(value) is not int:
        return value
    if name.endswith("vocab_size") or name == "ngram_vocab_size_base":
        return min(value, VOCAB)
    if name.endswith(("token_id", "token_index")) or name == "pad_index":
        return value if value < VOCAB else VOCAB - 1 - value % 16
    for names, end, smaller in _LIMITS:
        if name in names and level < end:
            return smaller(value)
    return value


def shrink(config_class: type, level: int) -> Any:
    """Return a config of the class with sizes reduced; level 6 reduces nothing."""
    default = config_class()
    if level == LEVELS[-1]:
        return default
    accepted = inspect.signature(config_class.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    changes: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_") or not (name in accepted or open_ended):
            continue
        smaller = value
        if not _is_config(value):
            smaller = _shrunk(name, value, level)
        elif _has_defaults(type(value)):
            smaller = shrink(type(value), level)
        if smaller is not value and smaller != value:
            changes[name] = smaller
    return config_class(**changes)


def _is_config(value: object) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _has_defaults(config_class: type) -> bool:
    """Whether a sub-config can be built from nothing, as `shrink` does."""
    try:
        config_class()
    except Exception:  # noqa: BLE001 - any failure means: keep the one there is
        return False
    return True


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after some seconds (main thread only)."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def architectures() -> list[tuple[str, str]]:
    """Return `(kind, model_type)` of everything the auto classes know."""
    from transformers.models.auto import modeling_auto as auto

    return [
        *(("base", name) for name in auto.MODEL_MAPPING_NAMES),
        *(("causal", name) for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ]


def builder(kind: str, model_type: str, level: int) -> Callable[[], nn.Module]:
    """Return a function that builds the model anew on each call."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

    config = shrink(CONFIG_MAPPING[model_type], level)
    auto = AutoModel if kind == "base" else AutoModelForCausalLM

    def build() -> nn.Module:
        model: nn.Module = auto.from_config(copy.deepcopy(config))
        return model

    return build


def choose(kind: str, model_type: str) -> int | str:
    """Find the first level that builds; returns it, or the reason why none does."""
    reason = ""
    for level in LEVELS:
        try:
            with time_limit(20), torch.device("meta"):
                model = builder(kind, model_type, level)()
        except Exception as error:  # noqa: BLE001 - the next level may work
            reason = reason or f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            continue
        size = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
        if size <= MAX_PARAMETERS:
            return level
        reason = f"{size:,} parameters at level {level}"
    return reason


def iter_cases(kinds: tuple[str, ...] = ("base", "causal")) -> Iterator[Case]:
    """Yield `(name, build, kind)` for each architecture that a choice is known for."""
    choices: dict[str, Any] = json.loads(CHOICES.read_text())
    for kind, model_type in architectures():
        level = choices.get(f"{kind}/{model_type}")
        if kind not in kinds or not isinstance(level, int):
            continue
        try:
            build = builder(kind, model_type, level)
        except Exception:  # noqa: BLE001 - a config of another transformers release
            continue
        yield model_type, build, kind


def main() -> None:
    """Make `zoo_choices.json`: a level per architecture, or why there is none."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = {
        f"{kind}/{model_type}": choose(kind, model_type)
        for kind, model_type in architectures()
    }
    CHOICES.write_text(json.dumps(chosen, indent=0) + "\n")
    for name, choice in chosen.items():
        if isinstance(choice, str):
            print(f"{name}: {choice}", file=sys.stderr)
    built = sum(isinstance(choice, int) for choice in chosen.values())
    print(f"{built} of {len(chosen)} architectures have a small config")


if __name__ == "__main__":
    main()

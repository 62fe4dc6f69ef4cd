"""Shrink transformers configurations until their models build in a moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

__all__ = ["candidates", "shrink"]

_HIDDEN, _HEADS, _LAYERS, _VOCAB = 64, 4, 2, 1024

_WIDTHS = {
    "hidden_size", "d_model", "embed_dim", "n_embd", "dim", "embedding_size",
    "projection_dim", "word_embed_proj_dim", "emb_dim", "model_dim", "width",
    "decoder_hidden_size", "encoder_hidden_size", "hidden_dim", "text_hidden_size",
    "vision_hidden_size", "audio_hidden_size", "out_hidden_size", "q_hidden_size",
    "text_embed_dim", "vision_embed_dim", "proj_dim", "lm_hidden_size",
}  # fmt: skip
_INNER = {
    "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
    "n_inner", "mlp_dim", "ffn_hidden_size", "moe_intermediate_size", "inner_dim",
    "shared_expert_intermediate_size", "block_ff_dim", "dim_feedforward",
    "moe_shared_expert_intermediate_size", "intermediate_size_mlp",
    "decoder_intermediate_size", "expert_ffn_hidden_size", "prefix_dense_size",
}  # fmt: skip
_HEAD_COUNTS = {
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "attention_heads", "num_key_value_heads", "n_kv_heads",
    "num_kv_heads", "decoder_num_attention_heads", "encoder_num_attention_heads",
    "decoder_num_key_value_heads", "encoder_num_key_value_heads", "n_head_kv",
}  # fmt: skip
_DEPTHS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
    "decoder_layers", "depth", "num_decoder_layers", "num_encoder_layers",
    "decoder_num_hidden_layers", "encoder_num_hidden_layers", "num_blocks",
    "perception_depth", "num_hidden_groups",
}  # fmt: skip
_HEAD_DIMS = {"head_dim", "d_kv", "attention_head_dim", "v_head_dim", "dim_head"}
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")


def candidates(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a configuration, the most shrunken first."""
    for level in ("small", "shallow", "default"):
        changed = copy.deepcopy(config)
        if level != "default":
            shrink(changed, narrow=level == "small")
        yield level, changed


def shrink(config: Any, *, narrow: bool = True) -> None:
    """Make a configuration small in place, its nested ones too.

    Args:
        config: Any transformers configuration.
        narrow: Also make it narrow; otherwise only shallow and short of words.
    """
    names = set(vars(config)) | set(_get(config, "attribute_map") or {})
    old = {name: _get(config, name) for name in names}
    depths = {v for k, v in old.items() if k in _DEPTHS and isinstance(v, int)}
    for name, value in old.items():
        new = _smaller(name, value, narrow)
        if new is None and isinstance(value, list) and len(value) in depths:
            new = value[:_LAYERS] if len(value) > _LAYERS else None
        if new is not None:
            _set(config, name, new)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, narrow=narrow)
    vocab = _get(config, "vocab_size")
    if isinstance(vocab, int):
        for name in _TOKENS:
            token = old.get(name)
            if isinstance(token, int) and token >= vocab:
                _set(config, name, 0)


def _smaller(name: str, value: Any, narrow: bool) -> Any:
    """Return the small value of a configuration entry; `None` to leave it alone."""
    if type(value) is not int or value <= 0:
        return None
    limit = None
    if name in _DEPTHS:
        limit = _LAYERS
    elif "vocab_size" in name:
        limit = _VOCAB
    elif name in _EXPERTS:
        limit = 4
    elif name in ("max_position_embeddings", "n_positions", "n_ctx"):
        limit = 512
    elif narrow:
        limit = _narrow_limit(name)
    return limit if limit is not None and value > limit else None


def _narrow_limit(name: str) -> int | None:
    """Return the limit of an entry that is a width or a number of heads."""
    if name in _WIDTHS:
        return _HIDDEN
    if name in _INNER:
        return 2 * _HIDDEN
    if name in _HEAD_COUNTS:
        return _HEADS
    if name in _HEAD_DIMS:
        return _HIDDEN // _HEADS
    return None


def _get(config: Any, name: str) -> Any:
    """Read an entry; some raise errors of their own, such as per-layer ones."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  a configuration's own trouble: left alone
        return None


def _set(config: Any, name: str, value: Any) -> None:
    """Set an entry; some are computed and cannot be set."""
    try:
        setattr(config, name, value)
    except Exception:  # noqa: BLE001  likewise
        return

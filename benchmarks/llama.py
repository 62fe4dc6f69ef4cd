"""Configurations of Hugging Face's Llama, by size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import LlamaConfig


class Shape(Protocol):
    """What the benchmarks call the sizes of a decoder."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def llama_config(shape: Shape, **other: Any) -> LlamaConfig:
    """Return the configuration of a Llama; `other` are arguments of `LlamaConfig`."""
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        **other,
    )

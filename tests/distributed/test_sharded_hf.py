"""Hugging Face models on meta, sharded by FSDP2, equal eager construction."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE, generator_states
from models import compare
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di

pytest.importorskip("transformers", reason="transformers is not installed")
Ranks = Callable[[int], RankPool]


def _config(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if name == "gpt2":
        return GPT2Config(
            n_layer=2, n_head=2, n_embd=12, vocab_size=33, n_positions=8, n_inner=20
        )
    return LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=12,
        intermediate_size=20,
        vocab_size=33,
        tie_word_embeddings=name == "tied llama",
    )


def _make(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(_config(name))


def _shard(model: Any) -> None:
    layers = (
        model.transformer.h if hasattr(model, "transformer") else (model.model.layers)
    )
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def _equal(_rank: int, name: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(2)
    expected = _make(name)
    state = generator_states()
    with torch.device("meta"):
        model = _make(name)
    _shard(model)
    held = dict(model.named_parameters())
    assert di.materialize(model, DEVICE, seed=2).ok
    assert torch.equal(generator_states(), state)
    compare(model, expected)
    assert all(p is held[key] for key, p in model.named_parameters())
    tokens = torch.tensor([[1, 2, 3]])
    got, wanted = model.eval()(tokens).logits, expected.eval()(tokens).logits
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama", "tied llama"])
def test_a_sharded_model_from_a_config_equals_eager(ranks: Ranks, name: str) -> None:
    ranks(2).run(_equal, name)


def _changed(_rank: int) -> None:
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        models = [_make("llama") for _ in range(2)]
        for model in models:
            model.lm_head = nn.Linear(12, 5)
    di.materialize(models[0], DEVICE, seed=2)
    _shard(models[1])
    di.materialize(models[1], DEVICE, seed=2)
    compare(models[1], models[0])


def test_a_model_changed_since_gets_the_values_that_it_gets_unsharded(
    ranks: Ranks,
) -> None:
    ranks(2).run(_changed)

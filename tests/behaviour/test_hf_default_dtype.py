"""A Hugging Face model on meta, made under another default dtype than is set later."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import deferred_init as di
from deferred_init.default_dtype import default_dtype
from tests.behaviour.equal_models import assert_same, on_meta

pytestmark = pytest.mark.hf

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def _build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("later", DTYPES)
@pytest.mark.parametrize("at_first", DTYPES)
def test_it_equals_eager_or_is_named(at_first: torch.dtype, later: torch.dtype) -> None:
    with default_dtype(at_first):
        torch.manual_seed(1)
        expected = _build()
        model = on_meta(_build)
    with default_dtype(later):
        report = di.materialize(model, "cpu", seed=1)
    if at_first in (later, torch.bfloat16):  # which nobody computes in by default
        assert report.assumptions == ()
        assert_same(model, expected)
    else:
        (text,) = report.assumptions
        assert f"while the default dtype was {later}, as it is now, and cast" in text
        with pytest.raises(AssertionError):
            assert_same(model, expected)


def test_a_model_that_was_cast_equals_eager_and_is_named() -> None:
    torch.manual_seed(1)
    expected = _build().double()
    model = on_meta(_build).double()
    report = di.materialize(model, "cpu", seed=1)
    assert_same(model, expected)
    (text,) = report.assumptions
    assert "was constructed while the default dtype was torch.float32" in text

"""Reports about other systems on Hugging Face models: loading, ties and buffers.

The number in each id is the row of `reports.md`: a symptom that users of some other
system met. Here each of them is right, or refused by name before anything is done.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import accelerate
import transformers as hf

import deferred_init as di
from tests.behaviour.equal_models import assert_same, on_meta, tensors
from tests.behaviour.hf_models import CONFIGS, builder, eager, loaded, materialized
from tests.behaviour.report_rows import Rows

pytestmark = pytest.mark.hf

ROWS = Rows()
row = ROWS.add


@row(1, "transient buffers are left on meta by load_state_dict(assign=True)")
def _() -> None:
    model, expected = loaded("mistral")
    assert model.model.rotary_emb.inv_freq.is_meta
    di.materialize(model, "cpu")
    assert_same(model, expected)
    model.to(torch.float64)


@row(2, "keys that a checkpoint lacks are made, and told")
def _() -> None:
    expected, _ = eager(builder("mistral"), seed=9)
    with accelerate.init_empty_weights():
        model = builder("mistral")()
    state = expected.state_dict()
    del state["lm_head.weight"]
    model.load_state_dict(state, strict=False, assign=True)
    the_plan = di.plan(model, "cpu")
    made = [slot.fqn for step in the_plan.steps for slot in step.claim.slots]
    assert made == ["lm_head.weight"]
    di.materialize(model, "cpu")
    assert model.lm_head.weight.isfinite().all()
    assert torch.equal(model.model.norm.weight, expected.model.norm.weight)


@row(7, "a model on meta is never copied from: it is made or refused")
def _() -> None:
    model = materialized(builder("gpt2"))
    assert not any(t.is_meta for _, t in tensors(model))


@row(11, "ties are found by identity; values on meta are never compared")
def _() -> None:
    model = materialized(builder("llama"), verify="full")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@row(13, "a Parameter set after construction is made by its module or refused")
def _() -> None:
    model = on_meta(builder("mistral"))
    proj = model.model.layers[0].self_attn.q_proj
    proj.magnitude = nn.Parameter(torch.empty(32, device="meta"))
    with pytest.raises(di.PlanError, match=r"q_proj\.magnitude"):
        di.materialize(model, "cpu")
    with torch.no_grad():
        proj.magnitude = nn.Parameter(torch.ones(32))
    di.materialize(model, "cpu", seed=5)
    assert torch.equal(proj.magnitude, torch.ones(32))


@row(14, "every tensor that cannot be made is named with its path")
def _() -> None:
    model = on_meta(builder("mistral"))
    for layer in model.model.layers:
        layer.scale = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu")
    assert "`model.layers.0.scale`" in str(caught.value)
    assert "`model.layers.1.scale`" in str(caught.value)


@row(16, "input and output embeddings stay one object")
def _() -> None:
    model = on_meta(builder("gpt2"))
    weight = model.lm_head.weight
    di.materialize(model, "cpu", seed=5)
    assert model.lm_head.weight is model.transformer.wte.weight is weight


@row(17, "a tie made inside init_empty_weights is one object in the end")
def _() -> None:
    with accelerate.init_empty_weights():
        model = builder("gpt2")()
    assert model.lm_head.weight is not model.transformer.wte.weight
    di.materialize(model, "cpu", seed=5)
    assert model.lm_head.weight is model.transformer.wte.weight


@row(20, "a tied model is made without an untied copy of its embedding")
def _() -> None:
    model = on_meta(builder("llama"))
    assert di.plan(model, "cpu").final_bytes == sum(
        t.numel() * t.element_size() for t in {t for _, t in tensors(model)}
    )
    di.materialize(model, "cpu", seed=5)
    tokens = torch.arange(3, 9)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected, _ = eager(builder("llama"))
    expected(input_ids=tokens, labels=tokens).loss.backward()
    ours, theirs = model.lm_head.weight.grad, expected.lm_head.weight.grad
    assert torch.equal(ours, theirs)


@row(25, "a composite model built by from_config on meta is tied")
def _() -> None:
    def build() -> nn.Module:
        config = CONFIGS["llava"]()
        config.tie_word_embeddings = True
        return hf.AutoModelForImageTextToText.from_config(config)

    expected, _ = eager(build)
    assert_same(materialized(build), expected)


@row(26, "a loaded side of a tie wins over the one on meta")
def _() -> None:
    expected, _ = eager(builder("llama"), seed=9)
    model = on_meta(builder("llama"))
    state = expected.state_dict()
    del state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=False, assign=True)
    head = model.lm_head.weight
    assert model.model.embed_tokens.weight.is_meta
    di.materialize(model, "cpu")
    assert model.model.embed_tokens.weight is head
    assert_same(model, expected)


@row(28, "parameters on meta are not taken for one tie because addresses are 0")
def _() -> None:
    model = materialized(builder("mistral"))
    expected, _ = eager(builder("mistral"))
    assert_same(model, expected)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@row(31, "rotary tables are computed, not read from fresh memory")
@row(37, "rotary tables are computed, not zeroed")
@row(38, "rotary tables need not be persistent to survive")
def _() -> None:
    for name in ("llama", "gemma3", "mixtral"):
        expected, _ = eager(builder(name))
        theirs = dict(expected.named_buffers())
        for rng in ("eager", "by_name"):
            model = materialized(builder(name), rng=rng, verify="full")
            for key, buffer in model.named_buffers():
                assert torch.equal(buffer, theirs[key]), key


@row(32, "a transient buffer that _init_weights forgets has its value, or is refused")
def _() -> None:
    class Forgetful(hf.GPT2Model):
        def __init__(self, config: hf.GPT2Config) -> None:
            super().__init__(config)
            table = torch.linspace(0.0, 1.0, 5)
            self.register_buffer("table", table, persistent=False)

    def build() -> nn.Module:
        return Forgetful(CONFIGS["gpt2"]())

    model = materialized(build)
    assert torch.equal(model.table, torch.linspace(0.0, 1.0, 5))
    changed = on_meta(build)
    changed.h[0] = nn.Identity()
    with pytest.raises(di.PlanError, match=r"`table` \(buffer of `Forgetful`\)"):
        di.materialize(changed, "cpu")


@row(34, "each tensor has the dtype that it was built with")
@row(41, "integer buffers keep their dtype in a low precision model")
def _() -> None:
    def build() -> nn.Module:
        config = CONFIGS["bert"]()
        return hf.AutoModel.from_config(config, dtype=torch.bfloat16)

    expected, _ = eager(build)
    model = materialized(build)
    assert_same(model, expected)
    assert model.embeddings.position_ids.dtype is torch.int64
    assert model.pooler.dense.weight.dtype is torch.bfloat16


@row(40, "constant scales of embeddings are kept")
def _() -> None:
    with accelerate.init_empty_weights(include_buffers=True):
        model = builder("gemma3")()
    di.materialize(model, "cpu", seed=5)
    expected, _ = eager(builder("gemma3"))
    ours = model.get_input_embeddings().embed_scale
    assert torch.equal(ours, expected.get_input_embeddings().embed_scale)


@row(44, "counters of batch norm start as in eager construction")
def _() -> None:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    )
    expected, _ = eager(lambda: hf.ResNetModel(config))
    assert_same(materialized(lambda: hf.ResNetModel(config)), expected)


@pytest.mark.parametrize("name", ROWS)
def test_what_others_reported_is_right_or_refused(name: str) -> None:
    ROWS[name]()

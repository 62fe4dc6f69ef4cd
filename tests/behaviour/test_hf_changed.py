"""Hugging Face models that differ from what their config would construct."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import transformers as hf

import deferred_init as di
from tests.behaviour.equal_models import assert_same, on_meta, tensors
from tests.behaviour.hf_models import CONFIGS, WAYS, builder, eager

pytestmark = pytest.mark.hf


class _Table(nn.Module):
    """A transient buffer that only its constructor knows how to fill."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(size)), persistent=False)


class _Custom(hf.PreTrainedModel):
    """A model whose constructor takes more than a config."""

    config_class = hf.GPT2Config

    def __init__(self, config: hf.GPT2Config, size: int) -> None:
        super().__init__(config)
        self.proj = nn.Linear(size, size)
        self.table = _Table(size)
        self.post_init()


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "bart", "vit"])
def test_seeding_by_name_gives_eager_buffers_and_repeatable_parameters(
    name: str, way: str
) -> None:
    build = builder(name)
    expected, _ = eager(build)
    model, again = WAYS[way](build), on_meta(build)
    di.materialize(model, "cpu", seed=5, rng="by_name")
    di.materialize(again, "cpu", seed=5, rng="by_name")
    assert_same(again, model)
    theirs = dict(expected.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, theirs[key]), key


def test_ties_by_memory_only_are_refused_where_they_cannot_be_mended() -> None:
    model = WAYS["init_empty_weights"](builder("gpt2"))
    model.transformer.h[0] = nn.Linear(3, 3, device="meta")
    with pytest.raises(di.PlanError) as caught:
        di.plan(model, "cpu")
    text = str(caught.value)
    assert "`lm_head.weight and transformer.wte.weight`" in text
    assert "call `model.tie_weights()` before" in text


def test_a_part_seeded_by_name_agrees_with_the_whole() -> None:
    build = builder("llama")
    whole, part = on_meta(build), on_meta(build)
    del part.model.layers[1]
    di.materialize(whole, "cpu", seed=5, rng="by_name")
    di.materialize(part, "cpu", seed=5, rng="by_name")
    made = dict(tensors(whole))
    for name, tensor in tensors(part):
        assert torch.equal(tensor, made[name]), name


def test_a_model_with_a_replaced_layer_is_made_along_its_tree() -> None:
    def build() -> nn.Module:
        model = builder("mistral")()
        model.lm_head = nn.Linear(32, 11)
        return model

    model = on_meta(build)
    report = di.materialize(model, "cpu", seed=5)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert abs(model.model.layers[0].mlp.up_proj.weight.std().item() - 0.02) < 0.002
    assert model.lm_head.weight.isfinite().all()
    assert any("in the order of the module tree" in t for t in report.assumptions)
    inner = {step.module_class: step.initializer for step in report.steps}
    assert inner["MistralModel"] == "transformers constructor"


def test_resized_embeddings_of_a_meta_model_are_made_along_its_tree() -> None:
    model = on_meta(builder("gpt2"))
    model.transformer.wte = nn.Embedding(101, 32, device="meta")
    model.lm_head = nn.Linear(32, 101, bias=False, device="meta")
    model.config.vocab_size = 101
    model.tie_weights()
    di.materialize(model, "cpu", seed=5)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.shape == (101, 32)
    assert abs(model.lm_head.weight.std().item() - 0.02) < 0.002


def test_loaded_tensors_are_not_touched_and_the_rest_is_what_eager_makes() -> None:
    build = builder("llama")
    loaded, _ = eager(build, seed=9)
    model = on_meta(build)
    state = {k: v for k, v in loaded.state_dict().items() if "layers.1" not in k}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    real = {name: t for name, t in tensors(model) if not t.is_meta}
    values = {name: t.clone() for name, t in real.items()}
    expected, _ = eager(build)
    di.materialize(model, "cpu", seed=5)
    made, theirs = dict(tensors(model)), dict(tensors(expected))
    for name, tensor in made.items():
        assert torch.equal(tensor, values.get(name, theirs[name])), name
    assert all(made[name] is tensor for name, tensor in real.items())
    assert not any(hasattr(t, "_is_hf_initialized") for t in made.values())


def test_a_mostly_loaded_large_model_is_not_constructed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deferred_init.handlers import hf_constructor

    monkeypatch.setattr(hf_constructor, "_SMALL_BYTES", 0)
    build = builder("llama")
    expected, _ = eager(build)
    model = on_meta(build)
    model.load_state_dict(copy.deepcopy(expected.state_dict()), assign=True)
    model.tie_weights()
    report = di.materialize(model, "cpu")
    assert_same(model, expected)
    assert report.peak_bytes is None
    assert report.predicted_peak_bytes < 10_000


def test_buffers_that_nobody_can_refill_are_refused_by_name() -> None:
    model = on_meta(lambda: _Custom(CONFIGS["gpt2"](), 4))
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu")
    assert "`table.table` (buffer of `_Table`)" in str(caught.value)
    assert "register an initializer for `_Table`" in str(caught.value)
    assert model.proj.weight.is_meta


def test_a_rule_of_the_user_is_preferred_inside_of_a_hugging_face_model() -> None:
    from deferred_init.handlers.registry import unregister_initializer

    model = on_meta(lambda: _Custom(CONFIGS["gpt2"](), 4))
    llama = on_meta(builder("llama"))

    @di.register_initializer(_Table)
    def fill(module: _Table) -> None:
        module.table.fill_(7.0)

    @di.register_initializer(hf.models.llama.modeling_llama.LlamaRMSNorm)
    def fill_norm(module: nn.Module) -> None:
        module.weight.detach().fill_(3.0)

    try:
        di.materialize([model, llama], "cpu", seed=5)
    finally:
        unregister_initializer(_Table)
        unregister_initializer(hf.models.llama.modeling_llama.LlamaRMSNorm)
    assert model.table.table.tolist() == [7.0] * 4


def test_an_init_that_cannot_be_tried_on_meta_is_a_plan_error() -> None:
    class Asking(_Custom):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear) and float(module.weight.sum()) > 0:
                module.weight.zero_()

    model = on_meta(lambda: Asking(CONFIGS["gpt2"](), 4))
    with pytest.raises(di.PlanError) as caught:
        di.plan(model, "cpu")
    text = str(caught.value)
    assert "`Asking.initialize_weights` of `the model` cannot be tried" in text
    assert "build the model inside `deferred_init(...)`" in text


def test_a_failing_constructor_leaves_the_model_on_meta() -> None:
    class Failing(hf.GPT2Model):
        def __init__(self, config: hf.GPT2Config) -> None:
            super().__init__(config)
            if not self.wte.weight.is_meta:
                raise OSError("no licence")

    model = on_meta(lambda: Failing(CONFIGS["gpt2"]()))
    flags = [vars(m).get("_is_hf_initialized") for m in model.modules()]
    state = torch.get_rng_state()
    with pytest.raises(di.MaterializeError, match="OSError: no licence"):
        di.materialize(model, "cpu", seed=1)
    assert all(tensor.is_meta for _, tensor in tensors(model))
    assert [vars(m).get("_is_hf_initialized") for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["torch.device", "to meta"])
@pytest.mark.parametrize("rng", ["eager", "by_name"])
def test_a_failure_in_the_middle_puts_everything_back(
    way: str, rng: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deferred_init import workspace

    model = WAYS[way](builder("t5"))
    before = {name: id(tensor) for name, tensor in tensors(model)}
    calls = 0
    original = workspace.exchange

    def fail_late(old: torch.Tensor, new: torch.Tensor, *rest: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise RuntimeError("out of memory")
        return original(old, new, *rest)

    monkeypatch.setattr(workspace, "exchange", fail_late)
    state = torch.get_rng_state()
    with pytest.raises(di.MaterializeError, match="out of memory"):
        di.materialize(model, "cpu", seed=5, rng=rng)
    assert {name: id(tensor) for name, tensor in tensors(model)} == before
    assert all(tensor.is_meta for _, tensor in tensors(model))
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.undo()
    di.materialize(model, "cpu", seed=5)
    assert_same(model, eager(builder("t5"))[0])


def test_a_mended_tie_has_the_attributes_of_both_sides() -> None:
    model = WAYS["to meta"](builder("gpt2"))
    model.transformer.wte.weight.shard_dim = 0
    model.lm_head.weight.shared_embedding = True
    di.materialize(model, "cpu", seed=5)
    weight = model.lm_head.weight
    assert weight is model.transformer.wte.weight
    assert (weight.shard_dim, weight.shared_embedding) == (0, True)

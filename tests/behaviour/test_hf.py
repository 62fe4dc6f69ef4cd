"""Hugging Face models built without memory become what eager construction makes."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

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

TOKENS = torch.arange(3, 15)[None]


def _loss(model: nn.Module) -> torch.Tensor:
    output = model(input_ids=TOKENS, labels=TOKENS)
    return output.loss


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_values_ties_and_generator_state_equal_eager_construction(name: str) -> None:
    build = builder(name)
    expected, state = eager(build)
    model = on_meta(build)
    before = {key: tensor for key, tensor in tensors(model) if tensor.is_meta}
    report = di.materialize(model, "cpu", seed=5)
    assert report.ok
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(dict(tensors(model))[key] is tensor for key, tensor in before.items())


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_it_does_not_matter_how_the_model_came_to_meta(name: str, way: str) -> None:
    build = builder(name)
    expected, state = eager(build)
    model = WAYS[way](build)
    di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "mamba"])
def test_a_training_step_gives_the_loss_of_the_eager_model(name: str) -> None:
    build = builder(name)
    expected, _ = eager(build)
    model = on_meta(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    di.materialize(model, "cpu", seed=5, optimizers=[optimizer])
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in (optimizer, theirs):
        owner = model if step is optimizer else expected
        owner.eval()
        _loss(owner).backward()
        step.step()
    assert torch.equal(_loss(model), _loss(expected))
    assert_same(model, expected)


def test_the_flags_of_transformers_end_as_in_eager_construction() -> None:
    build = builder("llama")
    expected, _ = eager(build)
    for way in WAYS.values():
        model = way(build)
        di.materialize(model, "cpu", seed=5)
        flags = [getattr(m, "_is_hf_initialized", None) for m in model.modules()]
        assert flags == [m._is_hf_initialized for m in expected.modules()]
        assert not any(hasattr(t, "_is_hf_initialized") for _, t in tensors(model))


@pytest.mark.parametrize("how", ["config", "after"])
def test_a_low_precision_model_equals_its_eager_twin(how: str) -> None:
    config = CONFIGS["llama"]()

    def build() -> nn.Module:
        if how == "config":
            return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return hf.LlamaForCausalLM(config).to(torch.bfloat16)

    expected, state = eager(build)
    model = on_meta(build)
    di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_option_of_the_constructor_is_found_out() -> None:
    def build() -> nn.Module:
        return hf.BertModel(CONFIGS["bert"](), add_pooling_layer=False)

    expected, state = eager(build)
    model = on_meta(build)
    report = di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert "add_pooling_layer=False" in str(report.to_dict())


def test_models_inside_of_an_ordinary_module_are_made_in_order() -> None:
    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = builder("gpt2")()
            self.head = nn.Linear(32, 1)
            self.reward = builder("bert")()

    expected, state = eager(Scorer)
    model = on_meta(Scorer)
    di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_models_in_one_call_are_made_one_after_the_other() -> None:
    torch.manual_seed(5)
    expected = [builder("gpt2")(), builder("t5")()]
    models = [on_meta(builder("gpt2")), on_meta(builder("t5"))]
    di.materialize(models, "cpu", seed=5)
    for model, other in zip(models, expected, strict=True):
        assert_same(model, other)


def test_frozen_parameters_and_attributes_stay() -> None:
    model = on_meta(builder("llama"))
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.norm.weight.sequence_parallel = True
    di.materialize(model, "cpu", seed=5)
    assert not model.lm_head.weight.requires_grad
    assert model.model.norm.weight.sequence_parallel is True


def test_settings_of_the_model_are_left_alone() -> None:
    model = on_meta(builder("gpt2"))
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    model.eval()
    model.generation_config.max_new_tokens = 3
    config = copy.deepcopy(model.config.to_dict())
    di.materialize(model, "cpu", seed=5)
    assert model.transformer.gradient_checkpointing
    assert not model.training
    assert model.config.to_dict() == config
    assert model.generate(TOKENS, do_sample=False).shape == (1, 15)


def test_the_model_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = on_meta(builder("gpt2"))
    di.materialize(model, "cpu", seed=5)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded.train(), model)


def test_planning_draws_no_random_numbers_and_changes_nothing() -> None:
    model = on_meta(builder("dinov2"))
    before = {name: id(tensor) for name, tensor in tensors(model)}
    state = torch.get_rng_state()
    di.plan(model, "cuda")
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(tensor) for name, tensor in tensors(model)} == before
    assert all(tensor.is_meta for _, tensor in tensors(model))


def test_a_parameter_that_ignores_the_meta_device_is_initialized_too() -> None:
    # `torch.Tensor(n)` does not know the device context: its memory is never filled.
    config = hf.ImageGPTConfig(n_embd=32, n_layer=1, n_head=4, n_positions=16)
    expected, _ = eager(lambda: hf.ImageGPTModel(config))
    model = on_meta(lambda: hf.ImageGPTModel(config))
    assert not model.ln_f.weight.is_meta
    report = di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert any("`ln_f.weight` has memory only because" in t for t in report.assumptions)


def test_full_verification_finds_what_a_constructor_forgets_to_fill() -> None:
    class Forgetful(hf.GPT2Model):
        def __init__(self, config: hf.GPT2Config) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.empty(4))

    model = on_meta(lambda: Forgetful(CONFIGS["gpt2"]()))
    with pytest.raises(di.AuditError, match="`scale`"):
        di.materialize(model, "cpu", seed=5, verify="full")


class Messages(logging.Handler):
    """Keeps what a logger says; not every release of transformers lets it through."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def test_a_second_construction_repeats_no_warnings() -> None:
    logger = hf.utils.logging.get_logger("transformers.talking")
    messages = Messages()
    logger.addHandler(messages)

    class Talking(hf.GPT2Model):
        def __init__(self, config: hf.GPT2Config) -> None:
            super().__init__(config)
            logger.warning("built")

    try:
        model = on_meta(lambda: Talking(CONFIGS["gpt2"]()))
        assert messages.found == ["built"]
        di.materialize(model, "cpu", seed=5)
        logger.warning("after")
        assert messages.found == ["built", "after"]
    finally:
        logger.removeHandler(messages)

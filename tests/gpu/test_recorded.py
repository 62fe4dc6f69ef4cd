"""Recorded models, replayed on a GPU, equal eager construction on that GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di

pytestmark = [pytest.mark.gpu, pytest.mark.hf]
transformers = pytest.importorskip("transformers")


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=3, n_embd=192, n_head=6, vocab_size=999)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    return transformers.LlamaForCausalLM(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=384,
    )
    return transformers.ViTForImageClassification(config)


def _mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(33, 65), nn.LSTM(65, 17), nn.BatchNorm1d(17))
    with torch.no_grad():
        model[0].weight.mul_(0.5).add_(torch.randn(65, 33) * 1e-3)
    nn.init.orthogonal_(model[1].weight_hh_l0)
    nn.init.trunc_normal_(model[0].bias, std=0.02)
    return model


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
    "mixed": _mixed,
}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _assert_equal(made: nn.Module, expected: nn.Module) -> None:
    ours, theirs = _state(made), _state(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].device == value.device, name
        assert ours[name].dtype == value.dtype, name
        assert ours[name].stride() == value.stride(), name
        assert torch.equal(ours[name], value), name


def _eager(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = build()
    return model, (torch.cuda.get_rng_state(), torch.get_rng_state())


@pytest.mark.parametrize("name", list(_BUILDERS))
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_recorded_equals_eager_on_the_gpu(name: str, verify: str) -> None:
    expected, states = _eager(_BUILDERS[name], 5)
    torch.manual_seed(5)
    model = di.deferred_init(_BUILDERS[name], device="cuda")
    assert all(tensor.is_meta for tensor in _state(model).values())
    report = di.materialize(model, "cuda", verify=verify)
    assert report.ok
    _assert_equal(model, expected)
    assert torch.equal(torch.cuda.get_rng_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("name", ["gpt2", "mixed"])
def test_a_seed_given_to_materialize_is_that_of_construction(name: str) -> None:
    expected, states = _eager(_BUILDERS[name], 6)
    torch.manual_seed(1)
    model = di.deferred_init(_BUILDERS[name], device="cuda")
    di.materialize(model, "cuda", seed=6)
    _assert_equal(model, expected)
    assert torch.equal(torch.cuda.get_rng_state(), states[0])


def test_values_can_be_those_of_the_cpu() -> None:
    torch.manual_seed(7)
    expected = _llama().to("cuda")
    torch.manual_seed(7)
    model = di.deferred_init(_llama)
    di.materialize(model, "cuda", values_from="cpu")
    _assert_equal(model, expected)


def test_a_part_made_alone_has_the_bits_of_the_whole() -> None:
    expected, _ = _eager(_llama, 8)
    torch.manual_seed(8)
    model = di.deferred_init(_llama, device="cuda")
    last = model.model.layers[2].mlp.down_proj
    di.materialize_module(last, device="cuda")
    theirs = expected.model.layers[2].mlp.down_proj.weight
    assert torch.equal(last.weight, theirs)
    assert model.lm_head.weight.is_meta


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_a_meta_model_equals_eager_on_the_gpu(name: str) -> None:
    expected, states = _eager(_BUILDERS[name], 9)
    with torch.device("meta"):
        model = _BUILDERS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    report = di.materialize(model, "cuda", seed=9, optimizers=[optimizer])
    assert report.ok
    _assert_equal(model, expected)
    assert torch.equal(torch.cuda.get_rng_state(), states[0])


def test_peak_memory_is_the_final_size_and_the_largest_tensor() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    gc.collect()  # what earlier tests left
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = build()
    plan = di.plan(model, "cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    report = di.materialize(model, "cuda", seed=0, dtype=torch.bfloat16)
    peak = torch.cuda.max_memory_allocated() - start
    final = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.final_bytes == final == report.final_bytes
    assert peak <= final + 2048 * 2048 * 4 + (1 << 20)


def test_the_device_asked_for_is_honoured_and_others_are_refused() -> None:
    with pytest.raises(di.PlanError, match="numbered 0 to"):
        di.materialize(nn.Linear(2, 2, device="meta"), "cuda:99")


def test_running_out_of_memory_puts_everything_back() -> None:
    free, _ = torch.cuda.mem_get_info()
    small = nn.Linear(64, 64, device="meta")
    huge = nn.Linear(1 << 16, free // (1 << 16), device="meta", dtype=torch.float32)
    model = nn.Sequential(small, huge)
    before = [id(p) for p in model.parameters()]
    gc.collect()
    state, used = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    with pytest.raises(di.MaterializeError, match=r"`1`.*OutOfMemory"):
        di.materialize(model, "cuda", seed=0)
    assert [id(p) for p in model.parameters()] == before
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert abs(torch.cuda.memory_allocated() - used) < 1 << 20

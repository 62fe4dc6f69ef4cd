"""Recorded on any machine, replayed on a GPU: the bits of eager GPU construction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deferred_init.record import (
    deferred_init,
    materialize_module,
    materialize_tensor,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Mixed(nn.Module):
    """Draws of many kinds, a seed, a value that is looked at, a fixed CPU table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 200)
        self.scale = nn.Parameter(torch.full((3,), torch.rand(5).max().item()))
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        base = torch.randn(64, 64)
        self.register_buffer("base", base)
        self.register_buffer("part", base[3:7])
        base.mul_(torch.rand(64))
        torch.manual_seed(21)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.register_buffer("rates", torch.linspace(0, 1, 5, device="cpu"))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 30)))
        self.head = nn.Linear(200, 10).to(torch.bfloat16)
        self.order = nn.Parameter(torch.randperm(9).float())


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3))


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=512,
            num_hidden_layers=3,
            intermediate_size=1376,
            num_attention_heads=8,
            vocab_size=3200,
        )
    )


def _vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=3))


BUILDS = {"mixed": Mixed, "gpt2": _gpt2, "llama": _llama, "vit": _vit}


def _eager(build, device):
    torch.manual_seed(7)
    with torch.device(device):
        model = build()
    return model, torch.cuda.get_rng_state(), torch.get_rng_state()


def _equal(eager: nn.Module, other: nn.Module) -> None:
    left = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    right = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.device == right[name].device, name
        assert tensor.dtype == right[name].dtype, name
        assert tensor.stride() == right[name].stride(), name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("recorded_for", ["cuda", "cpu"])
def test_replay_on_the_gpu_equals_eager_construction_there(name, recorded_for):
    build = BUILDS[name]
    if recorded_for == "cpu" and name == "mixed":
        pytest.skip("looks at a random value, which the CPU draws otherwise")
    eager, cuda_state, cpu_state = _eager(build, "cuda")
    torch.manual_seed(7)
    model = deferred_init(build, device=recorded_for)
    materialize_module(model, device="cuda")
    _equal(eager, model)
    assert torch.equal(torch.cuda.get_rng_state(), cuda_state)
    assert torch.equal(torch.get_rng_state(), cpu_state)


def test_values_of_the_cpu_can_be_had_as_well():
    torch.manual_seed(7)
    eager = Mixed()
    torch.manual_seed(7)
    model = deferred_init(Mixed, device="cpu")
    materialize_module(model)
    _equal(eager, model)


def test_tensors_made_in_reverse_order_have_the_same_bits():
    eager, *_ = _eager(Mixed, "cuda")
    torch.manual_seed(7)
    model = deferred_init(Mixed, device="cuda")
    state = torch.cuda.get_rng_state()
    for tensor in reversed(list(model.parameters())):
        materialize_tensor(tensor)
    for tensor in model.buffers():
        materialize_tensor(tensor)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    _equal(eager, model)


def test_recording_leaves_the_gpus_generator_alone_even_if_the_constructor_seeds():
    torch.manual_seed(7)
    torch.rand(1, device="cuda")
    state = torch.cuda.get_rng_state()
    deferred_init(Mixed, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_peak_memory_is_the_final_size_and_one_tensor():
    def build():
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))

    torch.cuda.empty_cache()
    model = deferred_init(build, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    materialize_module(model)
    final = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= final + 2048 * 2048 * 4 + (1 << 20)

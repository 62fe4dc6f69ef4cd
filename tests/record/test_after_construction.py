"""What is done to a deferred model before it is made real."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deferred_init.record import (
    DeferredTensor,
    ReplayError,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)


def small(self):
    self.linear = nn.Linear(3, 3)
    self.norm = nn.BatchNorm1d(3)
    self.head = nn.Linear(3, 3)


def initialize(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.orthogonal_(module.weight)
        nn.init.normal_(module.weight)
        module.bias.data.zero_()


def surgery(model):
    rows = torch.cat([model.linear.weight.data, model.linear.weight.data[:1] * 2])
    model.linear.weight = nn.Parameter(rows)
    with torch.no_grad():
        model.head.weight[0] = 0
    del model.norm.running_mean
    model.norm.register_buffer("running_mean", torch.zeros_like(model.head.bias) + 2)


CHANGES = {
    "half": lambda m: m.half(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "double then float": lambda m: m.double().float(),
    "to the cpu": lambda m: m.cpu(),
    "freeze": lambda m: m.requires_grad_(False),
    "train and eval": lambda m: m.eval(),
    "apply an initializer": lambda m: m.apply(initialize),
    "tie": lambda m: setattr(m.head, "weight", m.linear.weight),
    "weight surgery": surgery,
    "deepcopy a part": lambda m: setattr(m, "twin", copy.deepcopy(m.linear)),
    "seed, then initialize": lambda m: (torch.manual_seed(4), m.apply(initialize)),
    "scale in place": lambda m: m.linear.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_construction_are_recorded(assert_eager_equals_deferred, name):
    assert_eager_equals_deferred(small, CHANGES[name])


def test_a_state_dict_loaded_into_a_deferred_model(assert_eager_equals_deferred):
    state = nn.Module.state_dict(_built(small))
    state = {name: torch.ones_like(tensor) * 3 for name, tensor in state.items()}

    def load(model):
        result = model.load_state_dict(state)
        assert not result.missing_keys

    model = assert_eager_equals_deferred(small, load)
    assert bool((model.linear.weight == 3).all())
    state["linear.weight"].fill_(7)
    assert bool((model.linear.weight == 3).all())


def test_a_state_dict_assigned_to_a_deferred_model_is_real_at_once():
    state = {n: t.clone() for n, t in _built(small).state_dict().items()}
    model = deferred_init(lambda: _built(small))
    model.load_state_dict(state, assign=True)
    assert not is_deferred(model)
    assert torch.equal(model.linear.weight, state["linear.weight"])


def test_cuda_does_not_need_a_gpu_to_be_recorded():
    model = deferred_init(lambda: _built(small))
    model.cuda()
    assert is_deferred(model)
    assert "cuda" in repr(model.linear.weight)
    assert model.linear.weight.is_meta


def test_a_deferred_model_looks_like_a_meta_model_to_everybody():
    model = deferred_init(lambda: _built(small))
    for tensor in [*model.parameters(), *model.buffers()]:
        assert isinstance(tensor, DeferredTensor)
        assert tensor.is_meta
        assert tensor.device == torch.device("meta")
        assert not tensor.is_cuda
        assert not tensor.is_cpu
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_a_large_real_tensor_that_changes_after_it_was_read_is_refused():
    source = torch.ones(1 << 19)

    def build():
        weight = nn.Parameter(torch.empty(1 << 19))
        with torch.no_grad():
            weight.copy_(source)
        return weight

    tensor = deferred_init(build)
    source.add_(1)
    with pytest.raises(ReplayError, match="changed in place after it was recorded"):
        materialize_tensor(tensor)


def test_a_small_real_tensor_is_read_as_it_was():
    source = torch.ones(3)
    tensor = deferred_init(lambda: torch.zeros(3) + source)
    source.add_(1)
    assert torch.equal(materialize_tensor(tensor), torch.ones(3))


def test_values_of_another_recording_are_read_as_they_were():
    torch.manual_seed(0)
    first = deferred_init(torch.rand, 3)
    second = deferred_init(torch.zeros, 3)
    second.copy_(first)
    first.mul_(0)
    materialize_tensor(second)
    torch.manual_seed(0)
    assert torch.equal(second, torch.rand(3))
    assert torch.equal(materialize_tensor(first), torch.zeros(3))


def test_an_optimizer_made_before_trains_the_same_objects():
    model = deferred_init(lambda: nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    materialize_module(model)
    before = model.weight.clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert not torch.equal(before, model.weight)


def test_hooks_put_on_deferred_parameters_fire():
    model = deferred_init(lambda: nn.Linear(3, 3))
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.shape))
    materialize_module(model)
    model(torch.ones(1, 3)).sum().backward()
    assert seen == [torch.Size([3, 3])]


def _built(body):
    module = nn.Module()
    body(module)
    return module

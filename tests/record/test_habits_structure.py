"""Constructors that tie, view, copy and rearrange."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from deferred_init.record import deferred_init, is_deferred, materialize_module


def test_data_is_replaced_copied_into_and_shared(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Linear(3, 3)
        self.a.weight.data = torch.randn(3, 3)
        self.a.bias.data.copy_(torch.arange(3.0))
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight.data = self.a.weight.data
        self.a.weight.data[0] = 5

    model = assert_eager_equals_deferred(body)
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr()


def test_in_place_operations_on_views_and_slices(assert_eager_equals_deferred):
    def body(self):
        self.weight = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.weight[1] = 1
            self.weight[:, 2].add_(torch.rand(4))
            self.weight.t()[0].mul_(3)
            self.weight[self.weight > 1] = 9
            self.weight += 1
            self.weight[0:2].copy_(torch.zeros(2, 4))
        self.embedding = nn.Embedding(5, 3, padding_idx=2)

    assert_eager_equals_deferred(body)


def test_buffers_that_are_views_of_each_other(assert_eager_equals_deferred):
    def body(self):
        base = torch.rand(4, 4)
        self.register_buffer("base", base)
        self.register_buffer("rows", base[1:3])
        self.register_buffer("turned", base.t(), persistent=False)
        base.mul_(2)
        self.plain = base[0]

    model = assert_eager_equals_deferred(body)
    model.base.fill_(8)
    assert bool((model.rows == 8).all())
    assert bool((model.plain == 8).all())


def test_ties_and_attributes_of_parameters(assert_eager_equals_deferred):
    def body(self):
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.tensor_model_parallel = True

    model = assert_eager_equals_deferred(body)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.tensor_model_parallel is True


def test_frozen_parameters_stay_frozen(assert_eager_equals_deferred):
    def body(self):
        self.linear = nn.Linear(2, 2)
        self.linear.weight.requires_grad_(False)
        self.linear.bias.requires_grad = False
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)

    assert_eager_equals_deferred(body)


def test_parametrizations(assert_eager_equals_deferred):
    def body(self):
        self.weight = parametrizations.weight_norm(nn.Linear(3, 4))
        self.spectral = parametrizations.spectral_norm(nn.Linear(3, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))

    assert_eager_equals_deferred(body)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_and_spectral_norm_keep_their_gradients(
    assert_eager_equals_deferred,
):
    def body(self):
        self.weight = nn.utils.weight_norm(nn.Linear(3, 4))
        self.spectral = nn.utils.spectral_norm(nn.Linear(3, 4))

    model = assert_eager_equals_deferred(body)
    model.weight.weight.sum().backward()
    assert model.weight.weight_v.grad is not None


def test_deep_copies_inside(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Linear(3, 3)
        self.b = copy.deepcopy(self.a)
        shared = nn.Module()
        shared.register_buffer("base", torch.rand(4))
        shared.register_buffer("part", shared.base[1:3])
        self.shared = shared
        self.copied = copy.deepcopy(shared)
        self.copied.base.add_(1)

    assert_eager_equals_deferred(body)


def test_conversions_inside(assert_eager_equals_deferred):
    def body(self):
        self.half = nn.Linear(3, 3).half()
        self.bf16 = nn.Linear(3, 3).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(4).half()
        self.double = nn.Linear(2, 2).double()
        self.weight = nn.Parameter(torch.rand(3))
        self.weight.data = self.weight.data.half()

    assert_eager_equals_deferred(body)


def test_device_arguments_and_device_checks(assert_eager_equals_deferred):
    def body(self):
        self.linear = nn.Linear(3, 3, device="cpu")
        device = self.linear.weight.device
        assert device.type == "cpu"
        assert not self.linear.weight.is_meta
        assert self.linear.weight.is_cpu
        self.register_buffer("steps", torch.arange(4, device=device))
        self.register_buffer("moved", torch.zeros(2, device="cpu").to(device=device))
        with torch.device("cpu"):
            self.other = nn.Linear(2, 2)
        self.steps_on = torch.zeros(2).to(dtype=torch.float64, device=device)

    assert_eager_equals_deferred(body)


def test_a_part_built_on_meta_on_purpose_stays_on_meta():
    def build():
        with torch.device("meta"):
            skeleton = nn.Linear(2, 2)
        return nn.Sequential(skeleton, nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    model = deferred_init(build)
    assert type(model[0].weight) is nn.Parameter
    materialize_module(model)
    assert model[0].weight.is_meta
    assert model[2].weight.is_meta
    assert not model[1].weight.is_meta
    assert not is_deferred(model)


def test_legacy_constructors(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Parameter(torch.Tensor(2, 3).uniform_())
        self.b = nn.Parameter(torch.FloatTensor(2, 2).fill_(3))
        self.c = nn.Parameter(torch.Tensor([1, 2, 3]))

    assert_eager_equals_deferred(body)


def test_operations_that_change_a_tensors_geometry(assert_eager_equals_deferred):
    def body(self):
        tensor = torch.rand(6)
        tensor.resize_(2, 3)
        tensor.t_()
        self.weight = nn.Parameter(tensor)
        other = torch.empty(0)
        other.set_(tensor)
        self.other = other
        self.squeezed = nn.Parameter(torch.rand(2, 1, 3).squeeze_())

    assert_eager_equals_deferred(body)


class Scaled(nn.Parameter):
    def doubled(self):
        return self * 2


class Tagged(torch.Tensor):
    pass


def test_parameter_and_tensor_subclasses_keep_their_class(assert_eager_equals_deferred):
    def body(self):
        self.weight = Scaled(torch.rand(3))
        assert isinstance(self.weight, Scaled)
        assert self.weight.doubled().shape == (3,)
        self.tagged = torch.rand(3).as_subclass(Tagged)

    assert_eager_equals_deferred(body)


def test_containers_and_buffers(assert_eager_equals_deferred):
    def body(self):
        self.items = nn.ParameterList([torch.randn(2) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(2)})
        self.buffer = nn.Buffer(torch.randn(2), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4))

    assert_eager_equals_deferred(body)


def test_torchs_own_modules(assert_eager_equals_deferred):
    def body(self):
        self.attention = nn.MultiheadAttention(8, 2)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
        self.lstm = nn.LSTM(4, 5, 2, bidirectional=True)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    model = assert_eager_equals_deferred(body)
    model.lstm(torch.rand(2, 1, 4))


def test_lazy_modules_stay_lazy():
    def build():
        return nn.ModuleList([nn.Linear(2, 2), nn.LazyLinear(4)])

    torch.manual_seed(0)
    model = deferred_init(build)
    materialize_module(model)
    ours = model[1](torch.ones(1, 3))
    torch.manual_seed(0)
    assert torch.equal(build()[1](torch.ones(1, 3)), ours)


def test_a_lazy_parameter_comes_out_as_torchs_own():
    model = deferred_init(lambda: nn.ModuleList([nn.Linear(2, 2), nn.LazyLinear(4)]))
    materialize_module(model)
    assert type(model[1].weight) is nn.UninitializedParameter


def test_a_default_dtype_set_inside_is_remembered(assert_eager_equals_deferred):
    def body(self):
        torch.set_default_dtype(torch.float64)
        try:
            self.linear = nn.Linear(2, 2)
            self.plain = torch.rand(3)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_eager_equals_deferred(body)


def test_tensor_attributes_in_containers_become_real():
    def build():
        module = nn.Linear(2, 2)
        module.extra = [torch.rand(2), {"deep": torch.rand(2)}]
        module.alias = [module.weight]
        return module

    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    model = deferred_init(build)
    materialize_module(model)
    assert torch.equal(model.extra[0], eager.extra[0])
    assert torch.equal(model.extra[1]["deep"], eager.extra[1]["deep"])
    assert model.alias[0] is model.weight

"""Every class of `torch.nn` that owns tensors: materialized equals eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di

Build = Callable[..., nn.Module]


def _stack(**kw: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kw)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8, **kw))


def _decoder(**kw: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **kw), 2)


def _transformer(**kw: Any) -> nn.Module:
    return nn.Transformer(8, 2, 2, 3, 16, batch_first=True, **kw)


def _mha(**kw: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, add_bias_kv=True, **kw)


def _mha_split(**kw: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, kdim=4, vdim=6, bias=False, **kw)


CASES: dict[str, tuple[type[nn.Module], Build]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        nn.AdaptiveLogSoftmaxWithLoss,
        lambda **kw: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], **kw),
    ),
    "BatchNorm1d": (nn.BatchNorm1d, lambda **kw: nn.BatchNorm1d(4, **kw)),
    "BatchNorm1d-no-stats": (
        nn.BatchNorm1d,
        lambda **kw: nn.BatchNorm1d(4, track_running_stats=False, **kw),
    ),
    "BatchNorm2d": (nn.BatchNorm2d, lambda **kw: nn.BatchNorm2d(4, affine=False, **kw)),
    "BatchNorm3d": (nn.BatchNorm3d, lambda **kw: nn.BatchNorm3d(4, **kw)),
    "SyncBatchNorm": (nn.SyncBatchNorm, lambda **kw: nn.SyncBatchNorm(4, **kw)),
    "Bilinear": (nn.Bilinear, lambda **kw: nn.Bilinear(3, 4, 5, **kw)),
    "Conv1d": (nn.Conv1d, lambda **kw: nn.Conv1d(4, 6, 3, **kw)),
    "Conv2d": (nn.Conv2d, lambda **kw: nn.Conv2d(4, 6, 3, groups=2, **kw)),
    "Conv3d": (nn.Conv3d, lambda **kw: nn.Conv3d(4, 6, 3, bias=False, **kw)),
    "ConvTranspose1d": (
        nn.ConvTranspose1d,
        lambda **kw: nn.ConvTranspose1d(4, 6, 3, **kw),
    ),
    "ConvTranspose2d": (
        nn.ConvTranspose2d,
        lambda **kw: nn.ConvTranspose2d(4, 6, 3, **kw),
    ),
    "ConvTranspose3d": (
        nn.ConvTranspose3d,
        lambda **kw: nn.ConvTranspose3d(4, 6, 3, **kw),
    ),
    "Embedding": (nn.Embedding, lambda **kw: nn.Embedding(7, 4, **kw)),
    "Embedding-padding": (
        nn.Embedding,
        lambda **kw: nn.Embedding(7, 4, padding_idx=2, **kw),
    ),
    "EmbeddingBag": (
        nn.EmbeddingBag,
        lambda **kw: nn.EmbeddingBag(7, 4, padding_idx=0, **kw),
    ),
    "GRU": (nn.GRU, lambda **kw: nn.GRU(3, 4, 2, bidirectional=True, **kw)),
    "GRUCell": (nn.GRUCell, lambda **kw: nn.GRUCell(3, 4, **kw)),
    "GroupNorm": (nn.GroupNorm, lambda **kw: nn.GroupNorm(2, 4, **kw)),
    "InstanceNorm1d": (
        nn.InstanceNorm1d,
        lambda **kw: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, **kw),
    ),
    "InstanceNorm2d": (
        nn.InstanceNorm2d,
        lambda **kw: nn.InstanceNorm2d(4, affine=True, **kw),
    ),
    "InstanceNorm3d": (
        nn.InstanceNorm3d,
        lambda **kw: nn.InstanceNorm3d(4, track_running_stats=True, **kw),
    ),
    "LSTM": (nn.LSTM, lambda **kw: nn.LSTM(3, 4, 2, proj_size=2, **kw)),
    "LSTMCell": (nn.LSTMCell, lambda **kw: nn.LSTMCell(3, 4, bias=False, **kw)),
    "LayerNorm": (nn.LayerNorm, lambda **kw: nn.LayerNorm([2, 4], **kw)),
    "Linear": (nn.Linear, lambda **kw: nn.Linear(3, 4, **kw)),
    **(
        {
            "LinearCrossEntropyLoss": (
                nn.LinearCrossEntropyLoss,
                lambda **kw: nn.LinearCrossEntropyLoss(3, 4, bias=True, **kw),
            )
        }
        if hasattr(nn, "LinearCrossEntropyLoss")  # since torch 2.13
        else {}
    ),
    "MultiheadAttention": (nn.MultiheadAttention, _mha),
    "MultiheadAttention-split": (nn.MultiheadAttention, _mha_split),
    "PReLU": (nn.PReLU, lambda **kw: nn.PReLU(3, init=0.1, **kw)),
    "RMSNorm": (nn.RMSNorm, lambda **kw: nn.RMSNorm(4, **kw)),
    "RNN": (nn.RNN, lambda **kw: nn.RNN(3, 4, nonlinearity="relu", **kw)),
    "RNNBase": (nn.RNNBase, lambda **kw: nn.RNNBase("LSTM", 3, 4, **kw)),
    "RNNCell": (nn.RNNCell, lambda **kw: nn.RNNCell(3, 4, **kw)),
    "RNNCellBase": (nn.RNNCellBase, lambda **kw: nn.RNNCellBase(3, 4, True, 2, **kw)),
    "Transformer": (nn.Transformer, _transformer),
    "TransformerDecoder": (nn.TransformerDecoder, _decoder),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer,
        lambda **kw: nn.TransformerDecoderLayer(8, 2, 16, **kw),
    ),
    "TransformerEncoder": (nn.TransformerEncoder, _stack),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer,
        lambda **kw: nn.TransformerEncoderLayer(8, 2, 16, **kw),
    ),
}
# Values that the caller gives: refused by name, see below.
GIVEN = {
    "BCEWithLogitsLoss": lambda w: nn.BCEWithLogitsLoss(pos_weight=w),
    "BCELoss": nn.BCELoss,
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss,
    "MultiMarginLoss": lambda w: nn.MultiMarginLoss(weight=w),
    "NLLLoss": nn.NLLLoss,
    "FractionalMaxPool2d": lambda w: nn.FractionalMaxPool2d(
        2, output_size=2, _random_samples=w
    ),
    "FractionalMaxPool3d": lambda w: nn.FractionalMaxPool3d(
        2, output_size=2, _random_samples=w
    ),
    "ParameterList": lambda w: nn.ParameterList([nn.Parameter(w)]),
    "ParameterDict": lambda w: nn.ParameterDict({"w": nn.Parameter(w)}),
}
# They own nothing, or take their tensors from modules that stand in the table.
PASSIVE = {"Module", "NLLLoss2d"}


def _state(module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**named, **dict(module.named_buffers(remove_duplicate=False))}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = _state(model), _state(expected)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        assert tensor.dtype is other.dtype, name
        assert tensor.stride() == other.stride(), name
        assert tensor.requires_grad == other.requires_grad, name
        assert torch.equal(tensor, other), name


def _class_owns_tensors(kind: type[nn.Module]) -> bool:
    sources = [inspect.getsource(b) for b in kind.__mro__ if issubclass(b, nn.Module)]
    return any(
        mark in source
        for source in sources[:-1]
        for mark in ("Parameter(", "register_buffer(", "reset_parameters")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_torch_module_equals_eager_with_the_same_generator_state(
    name: str, dtype: torch.dtype
) -> None:
    build = CASES[name][1]
    torch.manual_seed(5)
    expected = build(device="cpu", dtype=dtype)
    state = torch.get_rng_state()
    model = build(device="meta", dtype=dtype)
    held = _state(model)
    report = di.materialize(model, "cpu", seed=5, verify="full")
    assert report.ok
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(_state(model)[key] is tensor for key, tensor in held.items())


def test_the_table_names_every_class_of_torch_nn_that_owns_tensors() -> None:
    owning = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and not name.startswith("Lazy")
        and _class_owns_tensors(kind)
    }
    covered = {kind.__name__ for kind, _ in CASES.values()}
    assert owning - covered - set(GIVEN) - PASSIVE == set()


def test_the_search_for_owning_classes_finds_what_the_table_must_name() -> None:
    class New(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    assert _class_owns_tensors(New)
    assert not _class_owns_tensors(nn.ReLU)


@pytest.mark.parametrize("name", GIVEN)
def test_values_that_the_caller_gave_are_refused_by_name(name: str) -> None:
    shape = (2,) if name.endswith("Loss") else (1, 1, 3 if name.endswith("3d") else 2)
    model = GIVEN[name](torch.rand(shape, device="meta"))
    kind = type(model).__name__
    with pytest.raises(di.PlanError, match=rf"1 tensor has no initializer.*`{kind}`"):
        di.materialize(model, "cpu", seed=0)


@pytest.mark.parametrize("name", [name for name in GIVEN if "Parameter" not in name])
def test_the_same_classes_without_such_values_are_fine(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), GIVEN[name](None)).to("meta")
    assert di.materialize(model, "cpu", seed=0).ok


LAZY = [name for name in dir(nn) if name.startswith("Lazy")]


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_is_refused_with_what_to_do(name: str) -> None:
    kind = getattr(nn, name)
    arguments = () if "Norm" in name else (4,) if name == "LazyLinear" else (4, 3)
    model = nn.Sequential(nn.Linear(2, 2), kind(*arguments, device="meta"))
    needs = [p for p in model[1].parameters() if nn.parameter.is_lazy(p)]
    if not needs:
        needs = [b for b in model[1].buffers() if nn.parameter.is_lazy(b)]
    if not needs:
        pytest.fail(f"{name} has nothing lazy; move it to the table")
    with pytest.raises(di.PlanError, match=rf"`{name}`.*no shape yet.*dummy input"):
        di.materialize(model, "cpu", seed=0)


def test_an_rnn_keeps_its_flat_weights_the_same_objects_and_runs() -> None:
    torch.manual_seed(1)
    expected = nn.LSTM(3, 4, 2)
    model = nn.LSTM(3, 4, 2, device="meta")
    flat = list(model._flat_weights)
    di.materialize(model, "cpu", seed=1)
    assert all(a is b for a, b in zip(model._flat_weights, flat, strict=True))
    assert all(
        a is b
        for a, b in zip(model._flat_weights, list(model.parameters()), strict=True)
    )
    x = torch.ones(2, 1, 3)
    assert torch.equal(model(x)[0], expected(x)[0])


def test_all_layers_of_a_stack_begin_with_equal_values_of_one_draw() -> None:
    model = _stack(device="meta")
    report = di.materialize(model, "cpu", seed=2)
    first = dict(model.layers[0].named_parameters())
    for layer in model.layers[1:]:
        for name, param in layer.named_parameters():
            assert torch.equal(param, first[name])
            assert param is not first[name]
    assert any("layer that TransformerEncoder copied" in t for t in report.assumptions)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stack_with_one_loaded_layer_gives_the_others_eager_values(
    layer: int,
) -> None:
    torch.manual_seed(2)
    expected = _stack()
    model = _stack(device="meta")
    loaded = {
        f"layers.{layer}.{name}": torch.full_like(p, 7.0)
        for name, p in expected.layers[layer].named_parameters()
        if name.endswith("weight")
    }
    model.load_state_dict(loaded, strict=False, assign=True)
    di.materialize(model, "cpu", seed=2)
    for name, param in model.named_parameters():
        if name in loaded:
            assert param.eq(7).all()
        else:
            assert torch.equal(param, expected.get_parameter(name))


def test_attention_with_loaded_input_projection_still_zeroes_the_output_bias() -> None:
    torch.manual_seed(2)
    expected = nn.MultiheadAttention(8, 2)
    model = nn.MultiheadAttention(8, 2, device="meta")
    loaded = {
        "in_proj_weight": torch.ones(24, 8),
        "in_proj_bias": torch.ones(24),
    }
    model.load_state_dict(loaded, strict=False, assign=True)
    di.materialize(model, "cpu", seed=2)
    assert model.in_proj_weight.eq(1).all()
    assert torch.equal(model.out_proj.weight, expected.out_proj.weight)
    assert model.out_proj.bias.eq(0).all()


def test_attention_leaves_a_loaded_output_bias_alone() -> None:
    model = nn.MultiheadAttention(8, 2, device="meta")
    loaded = {"out_proj.bias": torch.full((8,), 3.0)}
    model.load_state_dict(loaded, strict=False, assign=True)
    bias = model.out_proj.bias
    di.materialize(model, "cpu", seed=2)
    assert model.out_proj.bias is bias
    assert bias.eq(3).all()


def test_a_subclass_that_overrides_nothing_is_made_and_its_constructor_reported() -> (
    None
):
    class Wide(nn.Linear):
        def __init__(self, device: str | None = None) -> None:
            super().__init__(2, 8, device=device)

    torch.manual_seed(0)
    expected = Wide()
    model = Wide("meta")
    report = di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)
    assert any("the constructor of" in text for text in report.assumptions)


def test_a_subclass_with_another_init_method_is_made_by_that_method() -> None:
    class Small(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, std=1e-3)
            nn.init.ones_(self.bias)

    torch.manual_seed(0)
    expected = Small(3, 4)
    model = Small(3, 4, device="meta")
    di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)


def test_a_subclass_with_a_parameter_of_unknown_value_is_refused_by_name() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.full((2,), 0.1))

    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(di.PlanError, match=r"`scale` \(parameter of `Scaled`\)"):
        di.materialize(model, "cpu", seed=0)
    assert model.weight.is_meta


def test_a_tied_head_draws_what_its_constructor_drew() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(5, 5))
        model[1].weight = model[0].weight
        return model

    torch.manual_seed(0)
    expected = build()
    with torch.device("meta"):
        model = build()
    report = di.materialize(model, "cpu", seed=0)
    assert_same(model, expected)
    assert any("`1.weight`: shared with" in text for text in report.assumptions)

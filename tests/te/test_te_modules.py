"""TE modules on meta and on a CPU: values, carry-over, wrong values of TE, plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import has, te_needs
from te_equality import assert_same_parameters
from torch import nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = pytest.mark.te


def _stack(te: Any, device: str) -> nn.Module:
    return nn.Sequential(
        te.Linear(8, 16, device=device),
        te.LayerNormLinear(16, 8, device=device, zero_centered_gamma=True),
        te.LayerNormMLP(8, 16, device=device, activation="swiglu"),
        te.GroupedLinear(2, 8, 8, device=device),
        te.Linear(8, 8, bias=False, device=device),
        te.LayerNorm(8, device=device),
    )


def test_every_module_equals_eager_and_leaves_the_generator_as_eager_does(
    te: Any,
) -> None:
    model = _stack(te, "meta")
    di.materialize(model, "cpu", seed=0, verify="full")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = _stack(te, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_parameters(model, twin)
    assert all(bool((bias == 0).all()) for bias in (model[3].bias0, model[2].fc1_bias))


def test_objects_flags_attributes_and_hooks_stay(te: Any) -> None:
    model = _stack(te, "meta")
    before = dict(model.named_parameters())
    weight = model[0].weight
    weight.requires_grad_(False)
    weight.mine = "kept"
    weight.tensor_model_parallel = False  # the user's word counts
    model[0].bias.register_hook(lambda grad: grad * 2)
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", seed=0, optimizers=[optimizer])
    assert all(dict(model.named_parameters())[k] is v for k, v in before.items())
    assert (weight.requires_grad, weight.mine) == (False, "kept")
    assert weight.tensor_model_parallel is False
    assert model[1].weight.tensor_model_parallel is True
    model[0].bias.sum().backward()
    assert bool((model[0].bias.grad == 2).all())


def test_a_module_that_delays_weight_gradients_keeps_its_mark(te: Any) -> None:
    model = te.Linear(4, 4, device="meta", delay_wgrad_compute=True)
    di.materialize(model, "cpu", seed=0)
    assert model.weight.skip_backward_post_hook is True


def test_a_loaded_parameter_is_left_alone_and_the_stream_is_as_in_eager(
    te: Any,
) -> None:
    model = _stack(te, "meta")
    loaded = nn.Parameter(torch.full((16, 8), 2.0))
    model[0].weight = loaded
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    twin = _stack(te, "cpu")
    assert model[0].weight is loaded
    assert torch.equal(loaded, torch.full((16, 8), 2.0))
    assert torch.equal(model[2].fc1_weight, twin[2].fc1_weight)


def test_init_functions_survive_a_release_that_forgets_them(te: Any) -> None:
    class Forgets(te.Linear):  # type: ignore[misc,name-defined]
        """What releases up to 2.9 do when a parameter is registered again."""

        def register_parameter(self, name: str, param: Any, **kwargs: Any) -> None:
            if hasattr(self, "param_init_meta"):
                self.param_init_meta.pop(name, None)
            super().register_parameter(name, param, **kwargs)

    def ones(tensor: torch.Tensor) -> None:
        nn.init.ones_(tensor)

    model = Forgets(4, 4, device="meta", init_method=ones)
    di.materialize(model, "cpu")
    assert bool((model.weight == 1).all())
    assert model.param_init_meta["weight"].init_fn is ones


def test_split_parameters_share_their_storage_as_in_eager(te: Any) -> None:
    def make() -> nn.Module:
        return te.Linear(8, 24, parameters_split=("query", "key", "value"))

    with on_meta():
        model = make()
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    twin = te.Linear(8, 24, parameters_split=("query", "key", "value"), device="cpu")
    assert_same_parameters(model, twin)
    pointers = {p.untyped_storage().data_ptr() for p in list(model.parameters())[:3]}
    assert len(pointers) == 1


def test_softmax_offset_is_zero_and_draws_nothing(te: Any) -> None:
    with on_meta():
        model = nn.ModuleList(
            te.DotProductAttention(2, 8, softmax_type=kind)
            for kind in ("learnable", "off-by-one")
        )
    torch.manual_seed(0)
    state = torch.get_rng_state()
    di.materialize(model, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each.softmax_offset, torch.zeros(2)) for each in model)


@pytest.mark.parametrize(("dim", "percent"), [(16, 1.0), (64, 0.3)])
def test_rotary_frequencies_are_computed_again(
    te: Any, dim: int, percent: float
) -> None:
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

    with on_meta():
        model = RotaryPositionEmbedding(dim, percent)
    di.materialize(model, "cpu")
    turned = int(dim * percent)
    expected = 1.0 / (10000.0 ** (torch.arange(0, turned, 2).float() / turned))
    assert torch.equal(model.inv_freq, expected)


def test_a_rotary_embedding_of_unknown_construction_is_an_assumption(te: Any) -> None:
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

    with on_meta():
        model = RotaryPositionEmbedding(16)
    copy = RotaryPositionEmbedding.__new__(RotaryPositionEmbedding)
    copy.__dict__.update(model.__dict__)
    plan = di.plan(copy, "cpu")
    assert any("even number of dimensions" in text for text in plan.assumptions)


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "cuda", None])
def test_on_meta_defers_however_the_device_is_spelt(te: Any, device: Any) -> None:
    spelt = {} if device is None else {"device": device}
    grouped = has("ops.GroupedLinear")
    with on_meta():
        model = nn.ModuleList(
            [
                te.Linear(4, 4, **spelt),
                te.TransformerLayer(16, 16, 2, fuse_qkv_params=False, **spelt),
                te.ops.Linear(4, 4, **spelt),
                *((te.ops.GroupedLinear(2, 4, 4, **spelt),) if grouped else ()),
                te.RMSNorm(4, **spelt),
                nn.Linear(4, 4),
            ]
        )
    assert all(param.is_meta for param in model.parameters())
    di.materialize(model, "cpu", seed=0)


def test_on_meta_works_without_a_gpu_and_leaves_nothing_patched(bare_te: Any) -> None:
    te = bare_te
    before = (te.Linear.__init__, te.Linear.reset_parameters, torch.cuda.is_available)
    with on_meta():
        model = te.Linear(4, 4)
        bias = te.ops.Bias(4)
    assert model.weight.is_meta
    assert bias.bias.is_meta
    after = (te.Linear.__init__, te.Linear.reset_parameters, torch.cuda.is_available)
    assert after == before
    if not torch.cuda.is_available():
        # An assertion, in older releases.
        with pytest.raises((RuntimeError, AssertionError), match="needs CUDA"):
            te.Linear(4, 4, device="meta")


def test_on_meta_obeys_an_explicit_cpu(te: Any) -> None:
    with on_meta():
        table = torch.linspace(0, 1, 4, device="cpu")
        linear = te.ops.BasicLinear(4, 4, device="cpu")
    assert table.tolist()[-1] == 1.0
    assert linear.weight.device.type == "cpu"


def test_on_meta_tells_where_random_numbers_would_have_been_drawn(te: Any) -> None:
    seen: list[nn.Module] = []
    with on_meta(on_module=seen.append):
        first = te.Linear(4, 4)
        second = te.ops.Sequential(te.ops.Linear(4, 4), te.ops.LayerNorm(4))
    expected = [first, *second[0].basic_ops, second[1]]
    assert [id(module) for module in seen] == [id(module) for module in expected]


def test_hugging_face_models_come_out_deferred_too(te: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)
    with on_meta():
        model = transformers.GPT2LMHeadModel(config)
    assert all(param.is_meta for param in model.parameters())


def test_quantized_weights_on_a_cpu_are_refused_in_the_plan(te: Any) -> None:
    model = nn.Sequential(te.Linear(16, 16, device="meta"), nn.Linear(2, 2))
    with pytest.raises(di.PlanError, match=r"`0` \(Linear\) stores its weights"):
        di.plan(model, "cpu", "fp8_current")
    with pytest.raises(di.PlanError, match="does on CUDA only"):
        di.materialize(model, "cpu", "fp8_current")


def test_split_weights_cannot_be_quantized_and_the_plan_says_so(bare_te: Any) -> None:
    with on_meta():
        model = bare_te.Linear(16, 48, parameters_split=("query", "key", "value"))
    with pytest.raises(di.PlanError, match="splits its weight into 3 parameters"):
        di.plan(model, "cuda", "fp8_current")


def test_a_registered_rule_is_preferred_to_the_module_s_own_init(te: Any) -> None:
    class Mine(te.Linear):  # type: ignore[misc,name-defined]
        pass

    @di.register_initializer(Mine)
    def fill(module: Any) -> None:
        nn.init.constant_(module.weight, 3.0)
        nn.init.zeros_(module.bias)

    try:
        model = Mine(4, 4, device="meta")
        torch.manual_seed(0)
        state = torch.get_rng_state()
        di.materialize(model, "cpu")
        assert torch.equal(torch.get_rng_state(), state)
        assert bool((model.weight == 3).all())
    finally:
        from deferred_init.handlers.registry import unregister_initializer

        unregister_initializer(Mine)


@te_needs("joined weights")
@pytest.mark.parametrize(
    ("weight", "bias"), [(True, False), (True, True), (False, True)]
)
@pytest.mark.parametrize("kind", ["module", "op"])
def test_joined_parameters_are_made_and_holders_follow(
    te: Any, kind: str, weight: bool, bias: bool
) -> None:
    def make(device: str) -> nn.Module:
        joined = {"single_grouped_weight": weight, "single_grouped_bias": bias}
        cls = te.GroupedLinear if kind == "module" else te.ops.GroupedLinear
        return cls(2, 4, 4, device=device, **joined)

    model = make("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = di.materialize(model, "cpu", seed=0, optimizers=[optimizer])
    assert report.ok
    torch.manual_seed(0)
    twin = make("cpu")
    first, second = dict(model.named_parameters()), dict(twin.named_parameters())
    assert list(first) == list(second)
    for name, param in first.items():
        plain = type(param) is nn.Parameter
        mine = param if plain else param.rowwise_data
        other = second[name] if plain else second[name].rowwise_data
        assert torch.equal(mine, other), name
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


@te_needs("joined weights")
def test_joined_parameters_that_are_partly_loaded_are_refused(te: Any) -> None:
    model = te.GroupedLinear(2, 4, 4, device="meta", single_grouped_weight=True)
    model.weight0 = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(di.PlanError, match="load all of them, or none"):
        di.plan(model, "cpu")

"""`rng="fast"`: what it replaces, what it leaves alone, and what values depend on."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deferred_init as di
from deferred_init.fast.distributions import Normal, TruncatedNormal, Uniform
from deferred_init.fast.fill import fill
from deferred_init.fast.philox import stream_key
from deferred_init.fast.policy import Fast
from deferred_init.inventory import take_inventory
from deferred_init.tensor_names import TensorNames

Build = Callable[[], nn.Module]


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 8), nn.Linear(8, 6), nn.Conv2d(2, 3, 3), nn.LayerNorm(6)
    )


def _on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def _recorded(build: Build) -> nn.Module:
    model: nn.Module = di.deferred_init(build)
    return model


WAYS = pytest.mark.parametrize("way", [_on_meta, _recorded])


def _make(model: nn.Module, rng: str = "fast", **options: Any) -> dict[str, Tensor]:
    di.materialize(model, "cpu", rng=rng, **{"seed": 5, **options})
    return {name: value.detach() for name, value in model.named_parameters()}


@WAYS
def test_a_value_is_that_of_its_seed_name_and_place(way: Any) -> None:
    made = _make(way(_net))
    weight = torch.empty(50, 8)
    fill(weight, Normal(), stream_key(5, "0.weight", 0))
    assert torch.equal(made["0.weight"], weight)
    bound = 8**-0.5
    bias = torch.empty(6)
    fill(bias, Uniform(-bound, bound), stream_key(5, "1.bias", 0))
    assert torch.equal(made["1.bias"], bias)


@WAYS
def test_a_part_has_the_values_of_the_whole_in_any_order(way: Any) -> None:
    whole, part = way(_net), way(_net)
    del part[0]
    part.register_module("2", part._modules.pop("1"))
    part.register_module("1", part._modules.pop("0"))
    wanted, made = _make(whole), _make(part)
    assert torch.equal(made["1.weight"], wanted["1.weight"])
    assert torch.equal(made["2.weight"], wanted["2.weight"])


def test_recorded_models_and_models_on_meta_get_the_same_values() -> None:
    recorded, on_meta = _make(_recorded(_net)), _make(_on_meta(_net))
    assert all(torch.equal(recorded[name], value) for name, value in on_meta.items())


@WAYS
def test_values_are_of_the_seed_and_not_those_of_other_policies(way: Any) -> None:
    fast, other = _make(way(_net)), _make(way(_net), seed=6)
    by_name, eager = _make(way(_net), "by_name"), _make(way(_net), "eager")
    for name in ("0.weight", "1.weight", "2.bias"):
        assert not torch.equal(fast[name], other[name])
        assert not torch.equal(fast[name], by_name[name])
        assert not torch.equal(fast[name], eager[name])
    assert torch.equal(fast["3.weight"], torch.ones(6))


@WAYS
def test_the_generators_end_as_they_began(way: Any) -> None:
    model = way(_net)
    state, python = torch.get_rng_state(), random.getstate()
    _make(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_it_needs_a_seed() -> None:
    with pytest.raises(ValueError, match=r'rng="fast" needs a seed'):
        di.materialize(_on_meta(_net), "cpu", rng="fast")


def test_the_plan_and_the_report_name_it() -> None:
    model = _on_meta(_net)
    assert "rng=fast" in str(di.plan(model, "cpu", rng="fast", seed=1))
    assert "rng=fast" in str(di.materialize(model, "cpu", rng="fast", seed=1))


class Filled(nn.Module):
    """Has one weight, which a function fills."""

    def __init__(self, init: Callable[[Any], Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 24, dtype=dtype))
        self.init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.init(self.weight)


FILLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "normal_": (lambda w: nn.init.normal_(w, 0.1, 0.2), Normal(0.1, 0.2)),
    "uniform_": (lambda w: nn.init.uniform_(w, -2.0, 1.0), Uniform(-2.0, 1.0)),
    "trunc_normal_": (
        lambda w: nn.init.trunc_normal_(w, 0.0, 0.5, -0.7, 1.0),
        TruncatedNormal(0.0, 0.5, -0.7, 1.0),
    ),
    "xavier_normal_": (nn.init.xavier_normal_, Normal(0.0, (2 / 40) ** 0.5)),
    "kaiming_normal_": (nn.init.kaiming_normal_, Normal(0.0, (2 / 24) ** 0.5)),
    "a method": (lambda w: w.data.normal_(std=3.0), Normal(0.0, 3.0)),
    "a view of all": (lambda w: w.data.view(-1).uniform_(to=4), Uniform(0.0, 4.0)),
}


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", FILLS)
def test_whole_fills_are_replaced(how: str, dtype: torch.dtype, way: Any) -> None:
    init, distribution = FILLS[how]
    made = _make(way(lambda: Filled(init, dtype)))["weight"]
    wanted = torch.empty(16, 24, dtype=dtype)
    fill(wanted, distribution, stream_key(5, "weight", 0))
    assert torch.equal(made, wanted)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "orthogonal_": nn.init.orthogonal_,
    "exponential_": lambda w: w.data.exponential_(),
    "a part": lambda w: w.data.zero_()[2:].normal_(),
    "a transposed view": lambda w: w.data.t().normal_(),
}


@WAYS
@pytest.mark.parametrize("how", ["orthogonal_", "exponential_", "a part"])
def test_other_random_operations_are_seeded_by_name(how: str, way: Any) -> None:
    def build() -> nn.Module:
        return Filled(OTHERS[how], torch.float32)

    if how == "orthogonal_":  # whose input is a normal fill of a temporary
        made = _make(way(build))["weight"]
        assert torch.allclose(made @ made.t(), torch.eye(16), atol=1e-5)
    else:
        made = _make(way(build))["weight"]
        assert torch.equal(made, _make(way(build), "by_name")["weight"])


def test_double_precision_and_transposed_fills_are_seeded_by_name() -> None:
    for build in (
        lambda: Filled(nn.init.normal_, torch.float64),
        lambda: Filled(OTHERS["a transposed view"], torch.float32),
    ):
        made, wanted = _make(_on_meta(build)), _make(_on_meta(build), "by_name")
        assert torch.equal(made["weight"], wanted["weight"])


def test_a_truncation_far_in_the_tail_is_left_to_torch() -> None:
    made = _make(_on_meta(lambda: Filled(_far_tail, torch.float32)))["weight"]
    assert 5.5 <= float(made.min()) <= float(made.max()) <= 6.5
    reference = torch.empty_like(made)
    _far_tail(reference)
    # Torch 2.11 fills it with the bounds alone.
    assert made.unique().numel() > 300 or reference.unique().numel() <= 2


def _far_tail(weight: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may be imprecise
        nn.init.trunc_normal_(weight, 0.0, 1.0, 5.5, 6.5)


def test_a_generator_of_the_caller_is_used() -> None:
    def init(weight: Any) -> None:
        weight.data.normal_(generator=torch.Generator().manual_seed(1))

    made = _make(_on_meta(lambda: Filled(init, torch.float32)))["weight"]
    wanted = torch.empty(16, 24).normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(made, wanted)


def test_torch_is_as_it_was_after_a_failure() -> None:
    calls: list[int] = []

    def init(weight: Any) -> None:
        calls.append(len(calls))
        if len(calls) == last:
            raise RuntimeError("on purpose")
        nn.init.trunc_normal_(weight)

    before, last = nn.init._no_grad_trunc_normal_, -1
    _make(_on_meta(lambda: Filled(init, torch.float32)))
    last = len(calls)  # the plan has tried it out before
    calls.clear()
    model = _on_meta(lambda: Filled(init, torch.float32))
    with pytest.raises(di.MaterializeError, match="on purpose"):
        _make(model)
    assert nn.init._no_grad_trunc_normal_ is before
    assert model.weight.is_meta


@pytest.mark.parametrize("rng", ["by_name", "fast"])
def test_a_dispatch_mode_of_the_user_sees_every_tensor_that_is_allocated(
    rng: str,
) -> None:
    made: list[torch.Size] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.empty_strided.default:
                made.append(torch.Size(args[0]))
            return func(*args, **(kwargs or {}))

    alone, watched = _on_meta(_net), _on_meta(_net)
    di.materialize(alone, "cpu", seed=5, rng=rng)
    with Allocations():  # type: ignore[no-untyped-call]
        di.materialize(watched, "cpu", seed=5, rng=rng)
    assert made == [param.size() for param in watched.parameters()]
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_fills_of_one_tensor_draw_different_numbers() -> None:
    def init(weight: Any) -> None:
        weight.data.normal_()
        first = weight.data.clone()
        weight.data.normal_().sub_(first)

    made = _make(_on_meta(lambda: Filled(init, torch.float32)))["weight"]
    assert 1.2 < float(made.std()) < 1.6


def test_what_is_made_like_a_claimed_tensor_goes_by_its_name() -> None:
    # As Transformer Engine makes weights that it will quantize.
    model = _on_meta(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 6)))
    inventory = take_inventory((model,))
    slots, names = inventory.slots, TensorNames(inventory.roots)
    steps: Any = [
        SimpleNamespace(
            site=SimpleNamespace(fqn=fqn, module=model[int(fqn)]),
            claim=SimpleNamespace(
                slots=[s for s in slots if s.fqn.startswith(fqn)], rewrites=()
            ),
        )
        for fqn in ("0", "1")
    ]
    for step in steps:
        with Fast(5, torch.device("cpu"), names).step(step):
            made = torch.empty_like(model[int(step.site.fqn)].weight, device="cpu")
            nn.init.normal_(made)
            stray = torch.empty(6, 4).normal_()
        wanted = torch.empty(6, 4)
        fill(wanted, Normal(), stream_key(5, f"{step.site.fqn}.weight", 0))
        assert torch.equal(made, wanted)
        fill(wanted, Normal(), stream_key(5, step.site.fqn, 0))
        assert torch.equal(stray, wanted)

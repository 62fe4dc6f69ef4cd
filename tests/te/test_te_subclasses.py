"""Users' subclasses of Transformer Engine's classes, with an init of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di

pytestmark = pytest.mark.te


def _doubling(base: Any) -> Any:
    class Doubling(base):  # type: ignore[misc]
        def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
            super().reset_parameters(*args, **kwargs)
            with torch.no_grad():
                for param in self._parameters.values():
                    if param is not None and not param.is_meta:
                        param.mul_(2)

    return Doubling


CLASSES: dict[str, Callable[[Any, Any], Any]] = {
    "Linear": lambda cls, device: cls(8, 8, device=device),
    "LayerNormMLP": lambda cls, device: cls(8, 16, device=device),
    "RMSNorm": lambda cls, device: cls(8, device=device),
    "ops.BasicLinear": lambda cls, device: cls(8, 8, device=device),
    "ops.LayerNorm": lambda cls, device: cls(8, device=device),
}


def _class(te: Any, name: str) -> Any:
    return getattr(te.ops if name.startswith("ops.") else te, name.split(".")[-1])


def _assert_as_eager(make: Callable[[Any], nn.Module]) -> None:
    model = make("meta")
    held = dict(model.named_parameters())
    assert held
    report = di.materialize(model, "cpu", seed=0, verify="full")
    assert not report.assumptions
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = make("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    for name, param in twin.named_parameters():
        assert dict(model.named_parameters())[name] is held[name]
        assert torch.equal(held[name], param), name


@pytest.mark.parametrize("kind", CLASSES)
def test_an_overridden_reset_method_runs_once(te: Any, kind: str) -> None:
    own = _doubling(_class(te, kind))
    _assert_as_eager(lambda device: CLASSES[kind](own, device))


def test_init_methods_of_other_names_run_after_it(te: Any) -> None:
    class Scaled(te.Linear):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.init_weights()

        def init_weights(self) -> None:
            with torch.no_grad():
                nn.init.uniform_(self.weight, -1, 1)

    _assert_as_eager(lambda device: Scaled(8, 8, device=device))


def test_a_parent_that_writes_weights_of_layers_below_has_the_last_word(
    te: Any,
) -> None:
    class Model(nn.Module):
        def __init__(self, device: Any) -> None:
            super().__init__()
            self.mlp = te.LayerNormMLP(8, 16, device=device)
            self.out = _doubling(te.Linear)(8, 8, device=device)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, te.Linear):
                nn.init.normal_(module.weight, std=0.02)

    _assert_as_eager(Model)


def test_a_constructor_that_draws_a_second_time_is_an_assumption(te: Any) -> None:
    class Again(te.ops.BasicLinear):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not self.weight.is_meta:
                self.reset_parameters()

        def reset_parameters(self) -> None:
            super().reset_parameters()

    report = di.materialize(Again(8, 8, device="meta"), "cpu", seed=0)
    (text,) = report.assumptions
    assert text.endswith(
        "calls `reset_parameters` again, after that of its base class; here it is run "
        "once"
    )


def _scaled(te: Any, device: Any) -> Any:
    class Scaled(te.Linear):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(8, 8, device=device)
            self.scale = nn.Parameter(torch.full((8,), 3.0, device=device))

    return Scaled()


def test_a_parameter_that_a_subclass_adds_is_refused(
    te: Any,
) -> None:
    model = _scaled(te, "meta")
    with pytest.raises(di.PlanError, match=r"`scale` \(parameter of `Scaled`\)"):
        di.materialize(model, "cpu")


def test_a_parameter_that_is_added_with_memory_is_left_alone_and_draws_nothing(
    te: Any,
) -> None:
    model = _scaled(te, "meta")
    model.scale = scale = nn.Parameter(torch.full((8,), 3.0))
    order = [name for name, _ in model.named_parameters()]
    di.materialize(model, "cpu", seed=0)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = _scaled(te, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.scale is scale
    assert [name for name, _ in model.named_parameters()] == order
    for name, param in twin.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], param), name


def test_a_parameter_that_a_subclass_adds_is_made_by_its_own_method(
    te: Any,
) -> None:
    base = type(_scaled(te, "cpu"))

    class Filled(base):  # type: ignore[misc,valid-type]
        def __init__(self, device: Any) -> None:
            te.Linear.__init__(self, 8, 8, device=device)
            self.scale = nn.Parameter(torch.empty(8, device=device))
            self.init_weights()

        def init_weights(self) -> None:
            nn.init.constant_(self.scale, 3.0)

    model = Filled("meta")
    di.materialize(model, "cpu", seed=0)
    assert bool((model.scale == 3).all())


def _widened(te: Any) -> Any:
    class Widened(te.ops.BasicLinear):  # type: ignore[misc,name-defined]
        def __init__(self, device: Any) -> None:
            super().__init__(8, 8, device=device)
            self.scale = nn.Parameter(torch.full((8,), 3.0, device=device))
            self.register_buffer("steps", torch.arange(4.0, device=device))

    return Widened


def test_what_a_subclass_adds_to_an_op_is_refused_and_not_left_as_found(
    te: Any,
) -> None:
    model = nn.Sequential(_widened(te)("meta"))
    with pytest.raises(di.PlanError, match="2 tensors have no initializer") as found:
        di.materialize(model, "cpu")
    assert "`0.scale` (parameter of `Widened`)" in str(found.value)
    assert "`0.steps` (buffer of `Widened`)" in str(found.value)


def test_what_a_subclass_adds_to_an_op_is_made_by_the_method_that_names_it(
    te: Any,
) -> None:
    class Named(_widened(te)):  # type: ignore[misc]
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if "scale" in self._parameters:
                self._more()

        @torch.no_grad()
        def _more(self) -> None:
            nn.init.uniform_(self.scale)
            self.steps.zero_()

    class Below(Named):
        def __init__(self, device: Any) -> None:
            super().__init__(device)
            if device == "cpu":
                self.reset_parameters()

    model = Below("meta")
    di.materialize(model, "cpu", seed=0)
    assert bool((model.steps == 0).all())
    torch.manual_seed(0)
    twin = Named("cpu")
    assert torch.equal(model.weight, twin.weight)
    assert bool(((model.scale >= 0) & (model.scale <= 1)).all())


def test_a_method_of_an_op_that_goes_through_all_parameters_makes_all(
    te: Any,
) -> None:
    class All(_widened(te)):  # type: ignore[misc]
        def __init__(self, device: Any) -> None:
            super().__init__(device)
            del self.steps

        def reset_parameters(self) -> None:
            super().reset_parameters()
            for param in self.parameters():
                nn.init.constant_(param, 2.0)

    model = All("meta")
    di.materialize(model, "cpu", seed=0)
    assert all(bool((param == 2).all()) for param in model.parameters())


def test_an_op_that_makes_a_weight_makes_no_bias_that_a_subclass_adds(te: Any) -> None:
    class Biased(te.ops.BasicLinear):  # type: ignore[misc,name-defined]
        def __init__(self, device: Any) -> None:
            super().__init__(8, 8, device=device)
            self.bias = nn.Parameter(torch.full((8,), 3.0, device=device))

    with pytest.raises(di.PlanError, match=r"`bias` \(parameter of `Biased`\)"):
        di.materialize(Biased("meta"), "cpu")


@pytest.mark.parametrize("name", ["weight2", "fc1_bias", "layer_norm_weight"])
def test_a_recorded_parameter_with_a_name_like_transformer_engine_s_draws_nothing(
    te: Any, name: str
) -> None:
    class Wider(te.Linear):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_parameter(name, nn.Parameter(torch.full((8,), 3.0)))

    model = di.deferred_init(Wider, 8, 8)
    di.materialize(model, "cpu", seed=0)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = Wider(8, 8, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    for key, param in twin.named_parameters():
        assert torch.equal(model.get_parameter(key), param), key

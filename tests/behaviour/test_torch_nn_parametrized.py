"""Parametrized modules, and the older weight and spectral norm: equal to eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as deprecated_weight_norm

import deferred_init as di


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Mine(nn.Module):
    """A user class with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.bias = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.uniform_(self.bias)


def old_weight_norm(module: nn.Module, dim: int | None = 0) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return deprecated_weight_norm(module, dim=dim)


CASES: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "weight_norm-dim-None": lambda: parametrizations.weight_norm(
        nn.Linear(3, 4), dim=None
    ),
    "weight_norm-conv": lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2), dim=1),
    "weight_norm-bias": lambda: parametrizations.weight_norm(
        nn.Linear(3, 4), name="bias"
    ),
    "weight_norm-no-bias": lambda: parametrizations.weight_norm(
        nn.Linear(3, 4, bias=False)
    ),
    "weight_norm-user": lambda: parametrizations.weight_norm(Mine()),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "spectral_norm-1d": lambda: parametrizations.spectral_norm(
        nn.Linear(3, 4), name="bias"
    ),
    "spectral_norm-conv-transpose": lambda: parametrizations.spectral_norm(
        nn.ConvTranspose2d(3, 4, 2), n_power_iterations=3
    ),
    "spectral_norm-embedding": lambda: parametrizations.spectral_norm(
        nn.Embedding(5, 4, padding_idx=1)
    ),
    "orthogonal-householder": lambda: parametrizations.orthogonal(nn.Linear(3, 5)),
    "orthogonal-wide": lambda: parametrizations.orthogonal(nn.Linear(5, 3)),
    "orthogonal-no-trivialization": lambda: parametrizations.orthogonal(
        nn.Linear(3, 5), use_trivialization=False
    ),
    "weight_norm+spectral_norm": lambda: parametrizations.spectral_norm(
        parametrizations.weight_norm(nn.Linear(3, 4)), name="bias"
    ),
    "stateless": lambda: (
        parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
        or nn.Identity()
    ),
    "old-weight_norm": lambda: old_weight_norm(nn.Linear(3, 4)),
    "old-weight_norm-dim-None": lambda: old_weight_norm(nn.Conv1d(3, 4, 2), dim=None),
    "old-spectral_norm": lambda: old_spectral_norm(nn.Linear(3, 4)),
    "old-spectral_norm-conv-transpose": lambda: old_spectral_norm(
        nn.ConvTranspose1d(3, 4, 2)
    ),
}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
        found.update({f"{name}.{key}": value for key, value in plain.items()})
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_parametrized_module_equals_eager(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), CASES[name](), nn.Linear(2, 2))

    torch.manual_seed(4)
    expected = build()
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = build()
    held = _tensors(model)
    strides = {key: tensor.stride() for key, tensor in held.items()}
    report = di.materialize(model, "cpu", seed=4, verify="full")
    assert report.ok
    ours, theirs = _tensors(model), _tensors(expected)
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        # On meta, `orthogonal` cannot make its base; it is made anew.
        assert tensor is held.get(key, tensor), key
        assert tensor.requires_grad == theirs[key].requires_grad, key
        assert tensor.is_leaf == theirs[key].is_leaf, key
        assert tensor.stride() == strides.get(key, tensor.stride()), key
        if name != "orthogonal-no-trivialization":  # meta has no kernel for it
            assert tensor.stride() == theirs[key].stride(), key
        assert torch.equal(tensor, theirs[key]), key
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[1]).__name__ == type(expected[1]).__name__
    assert torch.equal(model[1].weight, expected[1].weight)


def test_gradients_reach_the_parameters_below_an_old_weight_norm() -> None:
    with torch.device("meta"):
        model = old_weight_norm(nn.Linear(3, 4))
    di.materialize(model, "cpu", seed=0)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight_g.grad is not None
    assert model.weight_v.grad is not None


@pytest.mark.parametrize("shape", [(3, 3), (3, 5)])
def test_an_orthogonal_module_moved_to_meta_equals_eager(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(4)
    expected = parametrizations.orthogonal(nn.Linear(*shape))
    model = parametrizations.orthogonal(nn.Linear(*shape)).to("meta")
    base = model.parametrizations.weight[0].base
    di.materialize(model, "cpu", seed=4)
    assert model.parametrizations.weight[0].base is base
    assert torch.equal(model.weight, expected.weight)
    identity = torch.eye(3)
    assert torch.allclose(model.weight.mT @ model.weight, identity, atol=1e-5)


def test_a_plan_leaves_a_parametrized_module_as_it_was() -> None:
    with torch.device("meta"):
        model = parametrizations.spectral_norm(nn.Linear(3, 4))
    before = {k: dict(v) for k, v in vars(model).items() if isinstance(v, dict)}
    state = torch.get_rng_state()
    di.plan(model, "cpu")
    after = {k: dict(v) for k, v in vars(model).items() if isinstance(v, dict)}
    assert {k: {i: id(x) for i, x in v.items()} for k, v in before.items()} == {
        k: {i: id(x) for i, x in v.items()} for k, v in after.items()
    }
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parametrization_with_tensors_of_its_own_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
        parametrize.register_parametrization(model[0], "weight", Scaled())
    with pytest.raises(
        di.PlanError,
        match=r"`0` \(`Linear`\) has parametrizations .*`Scaled` of `weight` holds",
    ):
        di.materialize(model, "cpu", seed=0)


def test_a_partly_loaded_parametrized_module_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = parametrizations.weight_norm(nn.Linear(3, 4))
    loaded = {"parametrizations.weight.original0": torch.ones(4, 1)}
    model.load_state_dict(loaded, strict=False, assign=True)
    with pytest.raises(di.PlanError, match="only a part of it is loaded"):
        di.materialize(model, "cpu", seed=0)


def test_a_parametrized_module_without_an_init_method_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

    with torch.device("meta"):
        model = parametrizations.weight_norm(Bare())
    with pytest.raises(di.PlanError, match=r"`Bare` has no `reset_parameters`"):
        di.materialize(model, "cpu", seed=0)

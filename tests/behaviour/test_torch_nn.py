"""Every class of `torch.nn` that owns tensors: materialized equals eager."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import assert_same, tensors
from tests.behaviour.torch_nn_classes import CASES, GIVEN, PASSIVE


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
    held = dict(tensors(model))
    report = di.materialize(model, "cpu", seed=5, verify="full")
    assert report.ok
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    made = dict(tensors(model))
    assert all(made[key] is tensor for key, tensor in held.items())


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

"""Arguments are checked first, and every refusal says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di


def _meta() -> nn.Linear:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA")
def test_cuda_on_a_machine_without_it_is_refused_with_the_remedy() -> None:
    with pytest.raises(di.PlanError, match="no cuda device on this machine") as caught:
        di.materialize(_meta(), "cuda:7")
    assert "Use device='cpu', or install a torch build with cuda" in str(caught.value)


def test_meta_is_no_target() -> None:
    with pytest.raises(ValueError, match="'meta' is what models come from"):
        di.materialize(_meta(), "meta")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rng": "fastest"}, "rng must be one of"),
        ({"verify": "some"}, "verify must be one of"),
    ],
)
def test_unknown_policies_are_refused(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        di.materialize(_meta(), "cpu", **arguments)


def test_an_audit_of_unknown_thoroughness_is_refused() -> None:
    with pytest.raises(ValueError, match="verify must be one of"):
        di.audit(nn.Linear(2, 2), verify="some")


def test_an_integer_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a floating-point"):
        di.materialize(_meta(), "cpu", dtype=torch.int8)


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module .* got int"):
        di.materialize([3], "cpu")
    with pytest.raises(TypeError, match="an empty sequence"):
        di.materialize([], "cpu")


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected torch optimizers"):
        di.materialize(_meta(), "cpu", optimizers=[3])


def test_data_parallel_around_a_deferred_model_is_refused_with_the_order() -> None:
    wrapper = nn.DataParallel(nn.Identity())  # with a GPU it moves what it is given
    wrapper.module = _meta()
    model = nn.Sequential(wrapper)
    with pytest.raises(di.PlanError, match="`0` is a `DataParallel`") as caught:
        di.materialize(model, "cpu")
    assert "materialize the bare model first, then wrap it" in str(caught.value)


def test_a_lazy_module_without_shapes_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(di.PlanError, match="with a dummy input on the meta") as caught:
        di.materialize(model, "cpu")
    assert "`0.weight`" in str(caught.value)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("graph", torch.eye(3).to_sparse().to("meta"))
    with pytest.raises(di.PlanError, match="`graph`"):
        di.materialize(model, "cpu")


def test_a_tensor_subclass_that_nobody_claims_is_refused_by_name() -> None:

    model = nn.Linear(2, 2, device="meta")

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device=inner.device
            )
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            unwrap = [a.inner if isinstance(a, Wrapped) else a for a in args]
            return cls(func(*unwrap, **(kwargs or {})))

    model.weight = nn.Parameter(Wrapped(model.weight.detach()))
    with pytest.raises(di.PlanError, match=r"`weight`.*is a `Wrapped`") as caught:
        di.materialize(model, "cpu")
    assert "no allocator claims" in str(caught.value)
    assert "Call `materialize` first, then convert" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank_timeout_s": 0}, "rank_timeout_s must be positive, found 0"),
        ({"values_from": "cuda"}, "values_from must be None or 'cpu', found 'cuda'"),
        ({"broadcast_from": 0}, "broadcast_from=0 needs a process group"),
        ({"missing": "zero"}, "missing must be one of"),
        ({"unexpected": "zero"}, "unexpected must be one of"),
        ({"names": {"a": "b"}}, "pass weights= too"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(
    arguments: dict[str, object], text: str
) -> None:
    model = _meta()
    with pytest.raises(ValueError, match=text):
        di.materialize(model, "cpu", **arguments)
    assert model.weight.is_meta


@pytest.mark.parametrize("names", ["a", 3, [3]])
def test_names_of_the_wrong_kind_are_refused(names: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        di.materialize(_meta(), "cpu", names=names)

"""Calls that few constructors make: each gives what it gives without recording."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.one_at_a_time import one_at_a_time
from deferred_init.record import deferred_init, materialize_module
from deferred_init.record.problems import user_line
from deferred_init.record.tensor import value_of

META = torch.device("meta")


def _to_of_another_tensor(self: Any) -> None:
    other = torch.zeros(1, dtype=torch.float64)
    self.a = torch.randn(3).to(other)
    self.b = torch.randn(3).to(tensor=other)
    self.c = torch.ones(3).to("cpu", torch.float64, False, True)


def _to_with_memory_format(self: Any) -> None:
    weight = torch.randn(2, 3, 4, 4)
    self.a = weight.to(torch.bfloat16, memory_format=torch.channels_last)


def _tensor_of_a_tensor(self: Any) -> None:
    rows = torch.randn(3)
    self.a = torch.as_tensor(rows, dtype=torch.float64)
    self.b = torch.asarray(rows)
    self.c = torch.tensor([1.0, 2.0], requires_grad=True)
    self.d = torch.as_tensor(rows, device="cpu")


def _fills_by_keyword(self: Any) -> None:
    self.a = torch.empty(4).normal_(mean=1.0, std=2.0)
    self.b = torch.empty(4).uniform_(to=3.0)
    self.c = torch.empty(4).normal_(2.0, std=0.5)
    self.d = torch.empty(4, dtype=torch.complex64).normal_(mean=0.0)


def _trunc_normal_of_a_real_tensor(self: Any) -> None:
    # Real, since numpy brought its memory.
    real = torch.from_numpy(np.zeros(8, dtype=np.float32))
    self.a = nn.init.trunc_normal_(real, std=2.0)
    self.b = torch.randn(2)


def _parameters_without_data(self: Any) -> None:
    self.a = nn.Parameter()
    self.b = nn.Parameter(torch.randn(2), False)


def _data_of_a_real_tensor(self: Any) -> None:
    real = torch.from_numpy(np.zeros(3, dtype=np.float32))
    real.data = torch.randn(3)
    self.a = real


def _full_of_a_tensor(self: Any) -> None:
    self.a = torch.full((2, 2), torch.tensor(3.0).item())
    self.b = torch.full(size=(2,), fill_value=4.0)
    self.c = torch.full((3,), torch.rand(()))


def _numpy_of_a_tensor(self: Any) -> None:
    drawn = torch.randn(3)
    self.a = torch.from_numpy(np.asarray(drawn, dtype=np.float64) * 2)
    self.b = drawn * 2


def _new_tensors(self: Any) -> None:
    drawn = torch.randn(3)
    real = torch.from_numpy(np.zeros(3))
    self.a = drawn.new_tensor([1, 2])
    self.b = drawn.new_tensor(data=[1.0], dtype=torch.float64, requires_grad=True)
    self.c = drawn.new_tensor([[drawn[0], 2.0]], device="cpu")
    self.d = drawn.new_full((2,), 3.0)
    self.e = drawn.new_empty(2).normal_()
    self.f = real.new_tensor([4], device="cpu")


def _sums_in_containers(self: Any) -> None:
    parts = [torch.randn(2), torch.randn(2)]
    self.a = torch.cat(parts)
    self.b = torch.stack((parts[0], parts[1]), dim=1)
    self.c = torch.block_diag(*parts)
    self.d, self.e = torch.split(self.a, 2)


def _sparse_from_dense(self: Any) -> None:
    dense = torch.eye(3) * torch.rand(3)
    self.a = dense.to_sparse().to_dense()
    self.b = torch.randn(2)


def _conjugates(self: Any) -> None:
    self.a = torch.randn(3, dtype=torch.complex64).conj()
    self.b = torch.view_as_real(torch.randn(2, dtype=torch.complex64))


def _generators(self: Any) -> None:
    """Torch hands a dispatched operation another object of the same generator."""
    generator = torch.Generator().manual_seed(4)
    self.a = torch.randn(3, generator=generator)
    self.b = torch.empty(3).uniform_(generator=generator)
    self.c = torch.randperm(5, generator=generator)
    self.d = torch.multinomial(torch.ones(4), 3, generator=generator)
    self.e = nn.init.trunc_normal_(torch.empty(3), generator=generator)
    self.f = torch.randint(0, 9, (3,), generator=generator)
    self.g = torch.bernoulli(torch.full((9,), 0.5), generator=generator)
    self.h = torch.randn(3)
    self.i = torch.randint(0, 9, (3,), generator=torch.default_generator)
    self.j = torch.randn(3)


def _copies_of_parameters(self: Any) -> None:
    self.a = nn.Parameter(torch.randn(3))
    self.a.tag = "mine"
    memo: dict[int, Any] = {}
    self.b = copy.deepcopy(self.a, memo)
    self.c = copy.deepcopy(self.a, memo)
    assert self.b is self.c


def _in_a_thread(self: Any) -> None:
    def work() -> None:
        self.a = torch.full((3,), 2.0)
        self.b = nn.Parameter(torch.arange(3.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _gradients_of_computed_values(self: Any) -> None:
    weight = nn.Parameter(torch.randn(3))
    self.weight = weight
    self.a = (weight * 2).detach()
    self.b = (weight + weight).sum().detach()


CALLS = [
    _to_of_another_tensor,
    _to_with_memory_format,
    _tensor_of_a_tensor,
    _fills_by_keyword,
    _trunc_normal_of_a_real_tensor,
    _parameters_without_data,
    _data_of_a_real_tensor,
    _full_of_a_tensor,
    _numpy_of_a_tensor,
    _new_tensors,
    _sums_in_containers,
    _sparse_from_dense,
    _conjugates,
    _generators,
    _copies_of_parameters,
    _in_a_thread,
    _gradients_of_computed_values,
]


@pytest.mark.parametrize("body", CALLS, ids=lambda body: body.__name__.strip("_"))
def test_an_uncommon_call_gives_what_it_gives_without_recording(
    body: Callable[[Any], None],
    assert_eager_equals_deferred: Callable[..., nn.Module],
) -> None:
    assert_eager_equals_deferred(body)


class Holder(nn.Module):
    def __init__(self, body: Callable[[Any], None]) -> None:
        super().__init__()
        body(self)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_meta_asked_for_by_the_constructor_stays_meta(
    dtype: torch.dtype | None,
) -> None:
    def body(self: Any) -> None:
        real = torch.randn(3)
        self.shape_only = real.to(META) if dtype is None else real.to(META, dtype)
        self.weight = nn.Parameter(real)

    model = deferred_init(Holder, body)
    assert model.shape_only.device == META
    assert model.shape_only.dtype == (dtype or torch.float32)
    assert type(model.shape_only) is Tensor
    materialize_module(model)
    assert model.weight.device.type == "cpu"


def test_a_copy_of_a_tensor_with_history_fails_as_torch_fails() -> None:
    def body(self: Any) -> None:
        copy.deepcopy(nn.Parameter(torch.randn(3)) * 2)

    message = "Only Tensors created explicitly by the user"
    with pytest.raises(RuntimeError, match=message):
        Holder(body)
    with pytest.raises(RuntimeError, match=message):
        deferred_init(Holder, body)


def test_recordings_describe_themselves() -> None:
    """For whoever debugs them: no values, and no memory."""
    found: list[str] = []

    def body(self: Any) -> None:
        self.weight = nn.Parameter(torch.randn(2, 3))
        value = value_of(self.weight)
        node = value.recording.nodes[value.node]
        found.extend([repr(value), repr(node), node.name])
        found.append(f"{value.shape} {value.dtype} {value.stride}")

    deferred_init(Holder, body)
    value, node, name, kind = found
    assert value.startswith("Value([2, 3], torch.float32, node ")
    assert name in node
    assert kind == "torch.Size([2, 3]) torch.float32 (3, 1)"


def test_the_line_that_a_problem_names_is_outside_of_torch_and_this_package() -> None:
    assert user_line().rpartition(":")[0] == __file__
    assert one_at_a_time(user_line)().rpartition(":")[0] == __file__


def test_an_operation_that_neither_records_nor_runs_is_named_with_its_line() -> None:
    library = torch.library.Library("deferred_init_test", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")

    def body(self: Any) -> None:
        torch.ops.deferred_init_test.nowhere(torch.randn(3))

    try:
        with pytest.raises(di.DeferredInitError) as caught:
            deferred_init(Holder, body)
    finally:
        library._destroy()
    message = str(caught.value)
    assert "deferred_init_test.nowhere.default" in message
    assert "can neither be recorded nor run" in message
    assert __file__ in message


class Tagged(nn.Parameter):
    """A parameter of a class of its own, as some libraries define."""


def test_copies_of_special_parameters_keep_their_class() -> None:
    def body(self: Any) -> None:
        weight = Tagged(torch.randn(3))
        self.weight = weight
        self.copies = nn.ParameterList([copy.deepcopy(weight) for _ in range(2)])

    torch.manual_seed(0)
    eager = Holder(body)
    torch.manual_seed(0)
    model = deferred_init(Holder, body)
    materialize_module(model)
    assert type(model.weight) is Tagged
    for made, wanted in zip(model.copies, eager.copies, strict=True):
        assert type(made) is type(wanted)
        assert made.requires_grad
        assert torch.equal(made, wanted)
    assert model.copies[0] is not model.copies[1]

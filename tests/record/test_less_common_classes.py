"""`out=`, nests of indices, fake and sparse tensors, subclasses, SVDs, storages."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import deferred_init as di
from deferred_init.record import RecordError
from tests.record.conftest import Built


def _of_numbers(out: Tensor) -> Tensor:
    return torch.add(torch.ones(3), 1, out=out)


def _of_a_product(out: Tensor) -> Tensor:
    return torch.matmul(torch.rand(3, 2), torch.rand(2, 3), out=out)


def _of_a_range(out: Tensor) -> Tensor:
    return torch.arange(0, 5, out=out)


def _of_draws(out: Tensor) -> Tensor:
    return torch.normal(0.0, 1.0, (4,), out=out)


def _of_parts(out: Tensor) -> Tensor:
    return torch.cat([torch.rand(2), torch.rand(3)], out=out)


def _of_chosen_elements(out: Tensor) -> Tensor:
    values = torch.rand(5)
    return torch.masked_select(values, values > 0.5, out=out)


def _transposed(out: Tensor) -> Tensor:
    return torch.add(torch.rand(2, 3).t(), 1, out=out)


_FILLS = (
    *(_of_numbers, _of_a_product, _of_a_range, _of_draws, _of_parts),
    *(_of_chosen_elements, _transposed),
)


@pytest.mark.parametrize("fill", _FILLS)
@pytest.mark.parametrize("shape", [(0,), (2, 2), (7,)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor")
def test_what_out_names_takes_the_size_of_the_result(
    assert_eager_equals_deferred: Any, fill: Any, shape: tuple[int, ...]
) -> None:
    def body(self: Any) -> None:
        self.out = torch.ones(shape)
        returned = fill(self.out)
        self.is_same = returned is self.out
        self.after = self.out + torch.rand(1)

    assert assert_eager_equals_deferred(body).is_same


def test_two_outputs_take_the_sizes_of_two_results(
    assert_eager_equals_deferred: Any,
) -> None:
    def body(self: Any) -> None:
        self.values, self.places = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.sort(torch.rand(5), out=(self.values, self.places))

    assert_eager_equals_deferred(body)


@pytest.mark.parametrize(
    "index",
    [
        [[0, 1], [1, 2]],
        [[0], [2]],
        (slice(None), [[0], [2]]),
        ([[1]], [[0, 1]]),
        (0, [True, False, True, False]),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_nest_of_lists_is_an_index_as_in_eager(
    assert_eager_equals_deferred: Any, index: Any
) -> None:
    def body(self: Any) -> None:
        self.table = torch.rand(4, 4, 4)
        self.rows = self.table[index]
        self.table[index] = 3.0

    assert_eager_equals_deferred(body)


def test_what_runs_in_a_fake_mode_is_not_part_of_the_model(
    assert_eager_equals_deferred: Any,
) -> None:
    def body(self: Any) -> None:
        self.before = torch.rand(3)
        with FakeTensorMode():
            features = nn.Linear(5, 7)(torch.randn(2, 5).normal_())
        self.width = features.shape[1]
        self.after = torch.rand(3)

    assert assert_eager_equals_deferred(body).width == 7


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_of_numbers_is_made_for_real() -> None:
    def body(self: Any) -> None:
        self.pairs = torch.sparse_coo_tensor([[0, 1], [1, 2]], torch.ones(2), (3, 3))
        self.rows = torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2))
        self.weight = nn.Parameter(torch.rand(2))

    eager, model = Built(body), di.deferred_init(Built, body)
    di.materialize(model, "cpu", seed=0)
    for name in ("pairs", "rows"):
        made, expected = getattr(model, name), getattr(eager, name)
        assert made.layout == expected.layout
        assert torch.equal(made.to_dense(), expected.to_dense())


class _Scaled(Tensor):
    """As libraries subclass `Tensor` to find their parameters again."""


def test_a_parameter_of_another_class_keeps_it(
    assert_eager_equals_deferred: Any,
) -> None:
    def body(self: Any) -> None:
        self.weight = nn.Parameter(torch.rand(3).as_subclass(_Scaled))

    model = assert_eager_equals_deferred(body)
    assert type(model.weight) is _Scaled
    assert isinstance(model.weight, nn.Parameter)


def test_singular_vectors_keep_the_layout_of_the_cpu(
    assert_eager_equals_deferred: Any,
) -> None:
    def body(self: Any) -> None:
        weight = torch.rand(4, 6)
        self.u, self.s, self.vh = torch.linalg.svd(weight, full_matrices=False)
        self.low = nn.Parameter(self.vh[2:])
        _, _, self.v = torch.svd(torch.rand(2, 5, 3))

    assert_eager_equals_deferred(body)


def test_a_copy_of_real_memory_and_of_a_generator_is_real(
    assert_eager_equals_deferred: Any,
) -> None:
    def body(self: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        self.a = torch.rand(3, generator=copy.deepcopy(generator))
        self.table = torch.from_numpy(np.arange(3.0))
        self.copied = copy.deepcopy(self.table)

    assert_eager_equals_deferred(body)


class _Quantizing(nn.Parameter):
    """As bitsandbytes: a class of its own over the data, which acts when moved."""

    def __new__(cls, data: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data, False)


def test_a_class_that_takes_over_recorded_data_is_refused_by_name() -> None:
    def body(self: Any) -> None:
        self.weight = _Quantizing(torch.rand(3))

    with pytest.raises(RecordError, match=r"`_Quantizing` at .*materialize the model"):
        di.deferred_init(Built, body)


def test_8_bit_weights_of_bitsandbytes_are_refused_by_name() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    with pytest.raises(RecordError, match="Int8Params"):
        di.deferred_init(bitsandbytes.nn.Linear8bitLt, 8, 8, has_fp16_weights=False)


def _empty_weights_by_hand(layer: nn.Module) -> nn.Module:
    for name, param in layer._parameters.items():
        assert param is not None
        options = {**vars(param), "requires_grad": param.requires_grad}
        layer._parameters[name] = type(param)(param.to("meta"), **options)
    return layer


def _empty_by_hand() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    return layers.apply(_empty_weights_by_hand)


def _empty_by_accelerate() -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))


@pytest.mark.parametrize("build", [_empty_by_hand, _empty_by_accelerate])
def test_weights_that_a_constructor_empties_are_made_as_those_on_meta(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model = di.deferred_init(build)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert not any(vars(param) for param in model.parameters())
    di.materialize(model, "cpu", seed=0)
    for made, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert made.requires_grad
        assert torch.equal(made, expected)


_IMPORTS = """
import torch
import deferred_init as di

def build():
    import torch._dynamo
    return torch.nn.Linear(2, 2)

model = di.deferred_init(build)
di.materialize(model, "cpu", seed=0)
compiled = torch.compile(model, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), model(torch.ones(2)))
"""


def test_a_constructor_may_import_the_compiler() -> None:
    # It compares torch's functions with its own, so that they must be torch's.
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)

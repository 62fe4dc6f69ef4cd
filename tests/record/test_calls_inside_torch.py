"""What torch's own functions do inside when their arguments are recorded tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deferred_init as di
from deferred_init.errors import DeferredInitError

BODIES: dict[str, Callable[[], Tensor]] = {
    # The device of another tensor is asked for in C++.
    "type_as of a recorded tensor": lambda: torch.arange(6).type_as(torch.rand(3)),
    "type_as and an operation": lambda: torch.arange(3).type_as(torch.rand(3)) * 2.0,
    "type_as of a real tensor": lambda: _real().type_as(torch.rand(3)),
    "to of a real tensor": lambda: _real().to(torch.rand(3)),
    "to of a real tensor, copied": lambda: _real().to(torch.rand(3), False, True),
    "softmax in another dtype": lambda: F.softmax(torch.rand(3), 0, dtype=torch.double),
    "circular padding": lambda: F.pad(torch.rand(1, 1, 3), (1, 1), mode="circular"),
    "rms_norm in bfloat16": lambda: F.rms_norm(torch.rand(2, 4).bfloat16(), (4,)),
    "a quantile": lambda: torch.quantile(torch.rand(7), 0.3),
    "a quantile between": lambda: torch.rand(7, 2).nanquantile(0.3, dim=0),
    "a weighted covariance": lambda: torch.cov(
        torch.rand(2, 3), aweights=torch.rand(3)
    ),
    "new of numbers": lambda: torch.rand(3).new([1, 2]),
    # Another way is taken for subclasses, to other bits.
    "eigvalsh": lambda: torch.linalg.eigvalsh(torch.randn(5, 5)),
    "svdvals": lambda: torch.linalg.svdvals(torch.randn(5, 5)),
    "a spectral norm": lambda: torch.linalg.norm(torch.randn(5, 5), 2),
    "norms of matrices": lambda: torch.linalg.matrix_norm(
        torch.randn(3, 4, 5), 2, dim=(0, 2)
    ),
    "a nuclear norm": lambda: torch.norm(torch.randn(5, 5), "nuc"),
    "a nuclear norm by method": lambda: torch.randn(5, 5).norm("nuc"),
    "a condition": lambda: torch.linalg.cond(torch.randn(5, 5)),
    "a norm that is used": lambda: _scaled(torch.randn(5, 5)),
    "eigenvalues with a gradient": lambda: torch.linalg.eigvalsh(
        nn.Parameter(torch.randn(5, 5))
    ).detach(),
    # Meta says nothing, or something else.
    "eigenvectors": lambda: torch.linalg.eig(torch.randn(4, 4))[1],
    "a transform of two dims": lambda: torch.fft.rfft2(torch.randn(4, 6)),
    "binomial numbers": lambda: torch.binomial(torch.full((9,), 5.0), torch.rand(9)),
    "a Dirichlet distribution": lambda: torch.distributions.Dirichlet(
        torch.ones(3)
    ).sample(),
    "Poisson numbers of a generator": lambda: torch.poisson(
        torch.full((9,), 5.0), torch.Generator().manual_seed(3)
    ),
    "binomial numbers of a generator": lambda: torch.binomial(
        torch.full((9,), 5.0), torch.rand(9), torch.Generator().manual_seed(3)
    ),
}


def _real() -> Tensor:
    return torch.from_numpy(np.ones(3))


def _scaled(weight: Tensor) -> Tensor:
    with torch.no_grad():
        weight.div_(torch.linalg.svdvals(weight).max())
    return weight


@pytest.mark.parametrize("name", BODIES)
def test_a_function_of_torch_gives_eagers_bits(
    name: str, assert_eager_equals_deferred: Callable[..., nn.Module]
) -> None:
    def body(self: Any) -> None:
        self.result = BODIES[name]()
        self.after = nn.Parameter(torch.rand(2))

    assert_eager_equals_deferred(body)


def test_a_shallow_copy_is_another_object_over_the_same_memory(
    assert_eager_equals_deferred: Callable[..., nn.Module],
) -> None:
    def body(self: Any) -> None:
        self.table = torch.rand(3)
        self.table.tag = "mine"
        self.twin = copy.copy(self.table)
        self.weight = nn.Parameter(torch.rand(3), requires_grad=False)
        self.other = copy.copy(self.weight)
        self.twin.mul_(2)
        assert self.twin is not self.table

    assert_eager_equals_deferred(body)


def _over_a_storage() -> Tensor:
    return torch.empty(0).set_(torch.rand(3).untyped_storage())


def _sobol() -> Tensor:
    return torch.quasirandom.SobolEngine(3).draw(4)


@pytest.mark.parametrize(
    ("build", "cure"),
    [
        (_over_a_storage, "pass the tensor itself"),
        (_sobol, "make its result before `deferred_init"),
    ],
)
def test_what_needs_memory_is_refused_with_the_line_and_the_cure(
    build: Callable[[], Tensor], cure: str
) -> None:
    with pytest.raises(DeferredInitError, match=r"test_calls_inside_torch.py:\d+") as e:
        di.deferred_init(build)
    assert cure in str(e.value)

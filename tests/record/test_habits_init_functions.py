"""Constructors that fill a tensor by a function of `torch.nn.init`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

INITIALIZERS = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_wide": lambda t: nn.init.trunc_normal_(t, std=2.0, a=-0.5, b=0.5),
    "constant_": lambda t: nn.init.constant_(t, 0.3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda t: nn.init.sparse_(t, 0.5),
}


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_every_nn_init_function(assert_eager_equals_deferred, name, shape):
    def body(self):
        self.weight = nn.Parameter(torch.empty(shape))
        INITIALIZERS[name](self.weight)
        self.after = nn.Parameter(torch.rand(2))

    assert_eager_equals_deferred(body)


def test_dirac_initialization_with_groups(assert_eager_equals_deferred):
    def body(self):
        self.weight = nn.Parameter(torch.empty(4, 4, 3, 3))
        nn.init.dirac_(self.weight, 2)

    assert_eager_equals_deferred(body)

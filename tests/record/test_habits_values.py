"""Constructors that look at values or bring their own."""

from __future__ import annotations

import math
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn


def test_item_gives_the_value_that_eager_would_see(assert_eager_equals_deferred):
    def body(self):
        self.scale = torch.rand(3).sum().item()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("filled", torch.full((2,), self.scale))

    assert_eager_equals_deferred(body)


def test_a_branch_on_a_value_takes_eagers_side(assert_eager_equals_deferred):
    def body(self):
        self.weight = nn.Parameter(torch.randn(4, 4))
        if self.weight.mean() > 0:
            self.weight.data.mul_(2)
        else:
            self.weight.data.mul_(-1)
        largest = float(self.weight.detach().max())
        self.gain = nn.Parameter(torch.ones(3) * largest)

    assert_eager_equals_deferred(body)


def test_tolist_of_a_linspace_gives_drop_path_rates(assert_eager_equals_deferred):
    def body(self):
        rates = torch.linspace(0, 0.2, 5).tolist()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate)) for rate in rates
        )
        assert [block[1].p for block in self.blocks] == rates
        assert rates[-1] == pytest.approx(0.2)

    assert_eager_equals_deferred(body)


def test_numpy_of_a_random_tensor_gives_its_values(assert_eager_equals_deferred):
    def body(self):
        array = torch.rand(4).numpy()
        self.register_buffer("doubled", torch.from_numpy(array * 2))
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)


def test_an_array_made_of_a_deferred_tensor_cannot_be_written_in_vain(
    assert_eager_equals_deferred,
):
    def body(self):
        array = torch.zeros(4).numpy()
        if not array.flags.writeable:  # recorded: eager's array would be shared
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)


def test_from_numpy_stays_real_and_shared_with_the_array(assert_eager_equals_deferred):
    def body(self):
        array = np.random.rand(3, 3).astype("float32")
        shared = torch.from_numpy(array)
        self.weight = nn.Parameter(shared * torch.rand(3, 3))
        array[0] = 7
        self.register_buffer("shared", shared)
        self.register_buffer("copied", shared.clone())

    assert_eager_equals_deferred(body)


def test_numpy_and_python_random_numbers_mix_with_torchs(assert_eager_equals_deferred):
    def body(self):
        self.weight = nn.Parameter(torch.full((2, 2), random.random()))
        self.linear = nn.Linear(2, 2)
        self.linear.weight.data.copy_(torch.from_numpy(np.random.randn(2, 2)))

    assert_eager_equals_deferred(body)


def test_a_tensor_of_an_array_is_split_and_listed(assert_eager_equals_deferred):
    def body(self):
        rates = torch.Tensor(np.linspace(0, 0.1, 4)).split([2, 2])
        self.rates = [part.tolist() for part in rates]
        self.register_buffer("all", torch.as_tensor(np.arange(3.0)))
        self.register_buffer("nested", torch.tensor([torch.tensor(1.0), 2.0]))

    model = assert_eager_equals_deferred(body)
    assert model.rates[1][1] == pytest.approx(0.1)


def test_random_fills_of_real_tensors_keep_their_place(assert_eager_equals_deferred):
    def body(self):
        real = torch.from_numpy(np.zeros(5, dtype="float32"))
        real.normal_()
        self.register_buffer("real", real)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("like", torch.rand_like(real))

    assert_eager_equals_deferred(body)


def test_operations_whose_shapes_depend_on_values(assert_eager_equals_deferred):
    def body(self):
        self.register_buffer("rows", torch.nonzero(torch.rand(3, 3) > 0.5))
        self.register_buffer("kinds", torch.unique(torch.randint(0, 4, (9,))))
        picked = torch.rand(6)
        self.register_buffer("picked", picked[picked > 0.4])
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)


def test_complex_rotary_tables(assert_eager_equals_deferred):
    def body(self):
        inverse = 1 / (1e4 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(5), inverse)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("pairs", torch.view_as_real(self.table))

    assert_eager_equals_deferred(body)


def test_equal_and_allclose_tell_the_truth(assert_eager_equals_deferred):
    def body(self):
        a = torch.rand(3)
        assert torch.equal(a, a.clone())
        assert not torch.equal(a, a + 1)
        assert torch.allclose(a, a + 1e-9)
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)


def test_a_scripted_helper_is_recorded(assert_eager_equals_deferred):
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.ones_like(x)

    with warnings.catch_warnings():  # torch.jit.script is deprecated, and still used
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(helper)

    def body(self):
        self.register_buffer("table", scripted(torch.rand(3)))

    assert_eager_equals_deferred(body)


def test_modules_built_in_threads_are_recorded(assert_eager_equals_deferred):
    def body(self):
        def build():
            self.linear = nn.Linear(3, 3)

        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            self.other = pool.submit(nn.Linear, 2, 2).result()

    assert_eager_equals_deferred(body)


def test_weights_read_from_a_file_inside_stay_real(
    assert_eager_equals_deferred, tmp_path: Path
):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.full((3, 3), math.pi)}, path)

    def body(self):
        self.linear = nn.Linear(3, 3)
        loaded = torch.load(path, weights_only=True)
        self.linear.weight.data.copy_(loaded["weight"])
        self.register_buffer("kept", loaded["weight"])

    assert_eager_equals_deferred(body)


# torch warns once that it does not check sparse tensors.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_tensors_are_made_for_real(assert_eager_equals_deferred):
    def body(self):
        dense = (torch.rand(4, 4) > 0.5).float()
        sparse = dense.to_sparse()
        rows = torch.tensor([[0, 1], [1, 0]])
        listed = torch.sparse_coo_tensor(rows, torch.rand(2), (2, 2))
        self.register_buffer("back", sparse.to_dense())
        self.register_buffer("listed", listed.to_dense())
        self.linear = nn.Linear(2, 2)

    assert_eager_equals_deferred(body)

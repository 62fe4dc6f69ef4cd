"""Values that stay in their file: never written to it, each with its own storage."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import deferred_init as di
from deferred_init.sources import open_source
from tests.weights.small_models import as_safetensors


def test_training_what_stayed_in_the_file_never_writes_to_it(tmp_path: Path) -> None:
    state = {"weight": torch.ones(40, 30), "bias": torch.zeros(40)}
    path = as_safetensors(state, tmp_path)
    before = path.read_bytes()
    model = nn.Linear(30, 40, device="meta")
    report = di.materialize(model, "cpu", weights=path)
    assert any("4,960 bytes stay in the file" in note for note in report.notes)
    model(torch.ones(30)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(model.weight, torch.zeros(40, 30))
    assert path.read_bytes() == before


def test_without_mmap_the_model_does_not_need_the_file_afterwards(
    tmp_path: Path,
) -> None:
    path = as_safetensors({"weight": torch.ones(4, 3)}, tmp_path)
    model = nn.Linear(3, 4, bias=False, device="meta")
    report = di.materialize(model, "cpu", weights=open_source(path, mmap=False))
    with path.open("r+b") as file:
        file.truncate(0)
    assert torch.equal(model.weight, torch.ones(4, 3))
    assert not any("stay in the file" in note for note in report.notes)


def test_each_tensor_that_stays_in_a_file_has_a_storage_of_its_own(
    tmp_path: Path,
) -> None:
    path = as_safetensors({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, tmp_path)
    model = nn.Linear(3, 4, device="meta")
    di.materialize(model, "cpu", weights=path)
    assert model.weight.untyped_storage().nbytes() == 48
    assert model.bias.untyped_storage().nbytes() == 16
    save_file(dict(model.state_dict()), tmp_path / "again.safetensors")


def test_a_plan_with_weights_reads_no_values_and_changes_nothing(
    tmp_path: Path,
) -> None:
    path = as_safetensors({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, tmp_path)
    model = nn.Linear(3, 4, device="meta")
    the_plan = di.plan(model, "cuda", weights=path)
    assert the_plan.final_bytes == 64
    assert [step.initializer.name for step in the_plan.steps] == ["checkpoint"]
    assert model.weight.is_meta

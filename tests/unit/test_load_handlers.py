"""An ecosystem counts as loaded when all of its handlers are, and not before."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.errors import PlanError
from deferred_init.handlers import ecosystems


@pytest.fixture
def ecosystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Add an ecosystem whose second handler needs a name that its package lacks."""
    package = types.ModuleType("stranger")
    monkeypatch.setitem(sys.modules, "stranger", package)
    monkeypatch.setitem(
        ecosystems._ECOSYSTEMS, "stranger", ("stranger_first", "stranger_second")
    )
    monkeypatch.setattr(ecosystems, "_loaded", ecosystems._loaded - {"stranger"})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger_first.py").write_text("import stranger")
    (tmp_path / "stranger_second.py").write_text("from stranger import _private")
    yield tmp_path
    for name in ("stranger_first", "stranger_second"):
        sys.modules.pop(name, None)


def test_handlers_that_cannot_be_imported_are_an_error_with_what_is_missing(
    ecosystem: Path,
) -> None:
    with pytest.raises(PlanError) as caught:
        di.materialize(nn.Linear(2, 2, device="meta"), "cpu")
    assert str(caught.value) == (
        "`stranger_second`, which serves the models of `stranger`, could not be "
        "imported (cannot import name '_private' from 'stranger' (unknown location)); "
        "the installed release may not be one that is supported: `deferred-init "
        "doctor` says what it lacks"
    )


def test_an_ecosystem_whose_import_failed_is_tried_again(ecosystem: Path) -> None:
    """It used to count as loaded, and its models were planned without handlers."""
    for _ in range(2):
        with pytest.raises(PlanError, match="stranger_second"):
            ecosystems.load_handlers()
    sys.modules["stranger"]._private = 3  # type: ignore[attr-defined]
    model = nn.Linear(2, 2, device="meta")
    assert di.materialize(model, "cpu", seed=0).ok
    assert "stranger" in ecosystems._loaded
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(2, 2).weight)

"""A materialized model is saved by DCP, and fills another one that is on meta."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from te_capabilities import has
from torch import nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = [
    pytest.mark.te,
    pytest.mark.filterwarnings("ignore::Warning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


@pytest.fixture
def _alone() -> Iterator[None]:
    """One process that is a group of its own, as an asynchronous save wants it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _build(te: Any) -> nn.Module:
    grouped = has("ops.GroupedLinear")
    with on_meta():
        return nn.Sequential(
            te.LayerNormMLP(8, 16),
            te.ops.Sequential(
                te.ops.Linear(8, 8),
                *((te.ops.GroupedLinear(2, 8, 8),) if grouped else ()),
            ),
            te.RMSNorm(8),
        )


def _saved(model: nn.Module, folder: Path, *, in_background: bool) -> None:
    state = dict(model.state_dict())
    assert any(name.endswith("_extra_state") for name in state)
    if in_background:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("in_background", [False, True])
def test_what_dcp_saved_comes_back_bit_by_bit(
    bare_te: Any, tmp_path: Path, in_background: bool
) -> None:
    model, other = _build(bare_te), _build(bare_te)
    di.materialize(model, "cpu", seed=0)
    _saved(model, tmp_path, in_background=in_background)
    held = [id(param) for param in other.parameters()]
    report = di.materialize(
        other, "cpu", weights=tmp_path, missing="error", unexpected="error"
    )
    assert report.ok
    assert [id(param) for param in other.parameters()] == held
    for mine, read in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, read)
    assert any("extra state were not read" in text for text in report.notes)

"""SIGKILL at every boundary while Transformer Engine's models are made and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.reliability.kills import kill_at_boundaries

pytestmark = pytest.mark.te


def _te() -> Any:
    """Transformer Engine in a victim, where it believes in a GPU."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    import transformer_engine.pytorch as te

    return te


def _ops(te: Any) -> nn.Module:
    return te.ops.Sequential(
        te.ops.RMSNorm(4, device="meta"),
        te.ops.Linear(4, 4, device="meta"),
    )


def _modules(te: Any) -> nn.Module:
    return nn.Sequential(
        te.LayerNormMLP(4, 8, device="meta"), te.Linear(4, 4, device="meta")
    )


def ops() -> nn.Module:
    return _ops(_te())


def modules() -> nn.Module:
    return _modules(_te())


@pytest.mark.parametrize("build", [_ops, _modules])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_kill_leaves_files_alone_and_nothing_behind(
    te: Any,
    build: Callable[[Any], nn.Module],
    loaded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # victims are forked
    source = build(te)
    di.materialize(source, "cpu", seed=0)
    path = tmp_path / "weights.pt"
    if loaded:
        state = {k: v for k, v in source.state_dict().items() if torch.is_tensor(v)}
        del state[next(iter(state))]  # one is initialized before the loading
        torch.save(state, path)
    kills = kill_at_boundaries(
        f"{__name__}:{build.__name__[1:]}", path if loaded else None, tmp_path
    )
    assert kills > 8

"""Tests with the real Transformer Engine on a machine without a GPU.

Where TE's constructors ask whether there is a GPU, the fixture `te` answers yes; the
modules then live on meta or on the CPU.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from te_capabilities import CAPABILITIES, has
from te_ranks import RankPool, Ranks

# Read by TE whenever a grouped layer is built.
os.environ.setdefault("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as _te
except (ImportError, OSError) as error:
    _te = None
    _WHY = f"Transformer Engine cannot be imported: {error}"
else:
    _WHY = ""

# CI sets this so that a broken installation cannot pass as a skip.
if _te is None and os.environ.get("DEFERRED_INIT_REQUIRE_TE"):
    raise RuntimeError(_WHY)


def pytest_configure(config: pytest.Config) -> None:
    # Transformer Engine warns of its own deprecations and experiments.
    config.addinivalue_line("filterwarnings", "ignore::Warning:transformer_engine")
    config.addinivalue_line("filterwarnings", "ignore:.*GroupedLinear.*:UserWarning")
    config.addinivalue_line(
        "markers", "te_needs(*names): needs what te_capabilities.py calls so"
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if _te is None:
            item.add_marker(pytest.mark.skip(reason=_WHY))
            continue
        for mark in item.iter_markers("te_needs"):
            for name in mark.args:
                if not has(name):
                    reason = CAPABILITIES[name].reason
                    item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine, which believes for the time of the test in a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return _te


@pytest.fixture
def bare_te() -> Any:
    """Transformer Engine as it is, without that belief."""
    return _te


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Pools of processes by their number; they end with the tests of a file."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.close()

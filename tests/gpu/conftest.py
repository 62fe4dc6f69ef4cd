"""Tests that need an NVIDIA GPU: `python -m pytest tests/gpu -q`.

See docs/gpu.md for the machine that they were run on.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as te
except (ImportError, OSError) as error:
    te = None
    _WHY = f"Transformer Engine cannot be imported: {error}"
else:
    _WHY = "" if torch.cuda.is_available() else "torch finds no CUDA device"

collect_ignore = ["te_models.py"]
if te is None:
    collect_ignore_glob = ["test_te_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # Transformer Engine warns of its own deprecations and experiments.
    config.addinivalue_line("filterwarnings", "ignore::Warning:transformer_engine")
    config.addinivalue_line("filterwarnings", "ignore:.*GroupedLinear.*:UserWarning")
    # It compiles functions, which takes torch through deprecated paths of its own.
    config.addinivalue_line("filterwarnings", "ignore:.*torch.jit:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute:UserWarning")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path) and _WHY:
            item.add_marker(pytest.mark.skip(reason=_WHY))


def pytest_report_header() -> str:
    return f"tests/gpu: {_WHY or torch.cuda.get_device_name()}"


@pytest.fixture(autouse=True)
def _fresh_fp8_state() -> Any:
    """Delayed scaling keeps lists for the whole process; every test starts anew."""
    yield
    if te is not None:
        from deferred_init.te.probe import fp8_state_manager

        fp8_state_manager().reset()

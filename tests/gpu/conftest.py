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

# Transformer Engine loads the system's cuDNN, which may be older than torch's own.
os.environ.setdefault("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK", "1")
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as te
except (ImportError, OSError) as error:
    # Set where Transformer Engine has to be there, so that no skip hides its loss.
    if os.environ.get("DEFERRED_INIT_REQUIRE_TE"):
        raise
    te = None
    _NO_TE = f"Transformer Engine cannot be imported: {error}"
else:
    _NO_TE = ""
_NO_GPU = "" if torch.cuda.is_available() else "torch finds no CUDA device"

collect_ignore = ["te_checkpoints.py", "te_models.py"]


def pytest_configure(config: pytest.Config) -> None:
    # Transformer Engine warns of its own deprecations and experiments.
    config.addinivalue_line("filterwarnings", "ignore::Warning:transformer_engine")
    config.addinivalue_line("filterwarnings", "ignore:.*GroupedLinear.*:UserWarning")
    # It compiles functions, which takes torch through deprecated paths of its own.
    config.addinivalue_line("filterwarnings", "ignore:.*torch.jit:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute:UserWarning")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path) and _NO_GPU:
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))


def pytest_report_header() -> str:
    return (
        f"tests/gpu: {_NO_GPU or torch.cuda.get_device_name()}; {_NO_TE or 'with TE'}"
    )


@pytest.fixture(autouse=True)
def _fresh_fp8_state() -> Any:
    """Delayed scaling keeps lists for the whole process; every test starts anew."""
    yield
    if te is not None:
        from deferred_init.te.probe import fp8_state_manager

        fp8_state_manager().reset()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List what eager models did that the tests compared with."""
    seen = [
        f"{report.head_line}: {value}"
        for report in terminalreporter.getreports("")
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == "eager"
    ]
    if seen:
        terminalreporter.section("eager models")
        for line in seen:
            terminalreporter.write_line(line)

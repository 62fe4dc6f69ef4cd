"""The package's dispatch modes do without `torch._dynamo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PROBE = """
import sys
import torch
from torch import nn
import deferred_init as di

how = sys.argv[1]
build = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
if how == "recorded":
    model = di.deferred_init(build)
else:
    with torch.device("meta"):
        model = build()
rng = how if how in ("by_name", "fast") else "eager"
verify = "full" if how == "full" else "fast"
di.materialize(model, "cpu", seed=0, rng=rng, verify=verify)
assert "torch._dynamo" not in sys.modules, how
"""


@pytest.mark.parametrize("how", ["eager", "by_name", "fast", "full", "recorded"])
def test_nothing_imports_dynamo(how: str) -> None:
    """Its import takes half a second and more, in each of a job's processes."""
    command = [sys.executable, "-c", _PROBE, how]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr

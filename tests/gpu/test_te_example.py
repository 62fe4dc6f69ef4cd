"""The example fails on plain Transformer Engine and works with its one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.te]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "te_ops_fp8.py"), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_example_trains() -> None:
    done = _run()
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()[-20:]]
    assert losses[-1] < losses[0]


def test_the_example_fails_without_its_one_line() -> None:
    done = _run("--plain")
    assert done.returncode != 0
    assert "expected device meta but got cuda:0" in done.stderr

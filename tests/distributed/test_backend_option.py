"""The same tests run on gloo or on NCCL, by one option."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ONE_TEST = (
    "tests/distributed/test_wrappers.py",
    *("-k", "a_deferred_model_inside_ddp_is_refused"),
)


def _pytest(*options: str, variable: str | None = None) -> tuple[int, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("DEFERRED_INIT_BACKEND", None)
    if variable is not None:
        environment["DEFERRED_INIT_BACKEND"] = variable
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *ONE_TEST, *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["option", "variable"])
def test_on_nccl_every_rank_needs_a_gpu_of_its_own(how: str) -> None:
    options = ("--backend", "nccl") if how == "option" else ()
    status, text = _pytest(*options, variable="nccl" if how == "variable" else None)
    assert status == 0, text
    found = torch.cuda.device_count()
    if found < 2:
        assert f"NCCL needs 2 GPUs, one a rank; torch finds {found}" in text
        assert "1 skipped" in text
    else:
        assert "1 passed" in text


def test_on_gloo_nothing_is_skipped_and_the_option_wins() -> None:
    status, text = _pytest("--backend", "gloo", variable="nccl")
    assert status == 0, text
    assert "1 passed" in text


def test_another_backend_is_refused() -> None:
    status, text = _pytest("--backend", "mpi")
    assert status == 4
    assert "invalid choice: 'mpi'" in text

"""The scripts for large models: a plan without memory, and small sizes for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deferred_init as di

pytest.importorskip("transformers")

pytestmark = [pytest.mark.hf, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_plan_of_405_billion_parameters_says_what_a_rank_keeps() -> None:
    out = _run(
        *("examples/init_large/llama3.py", "--size", "405b", "--recipe", "bf16"),
        *("--plan", "--gpu", "h200", "--world-size", "512"),
    )
    assert "405,853,388,800 parameters" in out
    assert "each of 512 ranks keeps 1,585,398,080 bytes" in out
    assert "fits: the peak is" in out


@pytest.mark.distributed
def test_a_seed_checkpoint_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    script = ("examples/init_large/llama3.py", "--size", "tiny", "--seed", "3")
    _run(*script, "--save", str(tmp_path / "one"))
    _run(*TORCHRUN, *script, "--save", str(tmp_path / "two"))
    from examples.init_large.llama3 import llama3_tiny

    model = di.deferred_init(llama3_tiny)
    di.materialize(model, "cpu", seed=3)
    eager = model.state_dict()
    for name in ("one", "two"):
        state = {"model": {key: torch.empty_like(v) for key, v in eager.items()}}
        with pytest.warns(UserWarning, match="torch.distributed"):
            dcp.load(state, checkpoint_id=tmp_path / name)
        for key, value in eager.items():
            assert torch.equal(state["model"][key], value), (name, key)


def test_a_mixture_of_experts_is_made_for_real() -> None:
    out = _run("examples/init_large/deepseek_v3.py", "--size", "tiny")
    assert "Materialized: ready" in out

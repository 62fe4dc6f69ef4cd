"""The example runs under torchrun, and the benchmark on a fake process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _example(num_processes: int) -> list[str]:
    # A standalone rendezvous chooses a free port by itself.
    return _run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_processes),
        "examples/fsdp2_torchrun.py",
    ).splitlines()


def test_the_example_makes_the_same_parameters_on_any_number_of_processes() -> None:
    one, two = _example(1), _example(2)
    assert one[-1].startswith("parameters ")
    assert two[-1] == one[-1]
    assert two[-2].endswith("ready: True")
    assert float(two[1].split()[-1]) < float(two[0].split()[-1]) + 1


@pytest.mark.parametrize("built", ["meta", "recorded"])
def test_the_benchmark_measures_one_rank_of_many(built: str) -> None:
    lines = _run(
        "benchmarks/scale.py",
        *("--device", "cpu", "--model", "tiny", "--built", built),
        *("--world", "8", "--world", "64", "--json"),
    ).splitlines()
    small, large = (json.loads(line) for line in lines)
    assert small["parameters"] == large["parameters"] == 78144
    assert small["shard_bytes"] == 2 * 78144 // 8
    assert large["shard_bytes"] <= small["shard_bytes"] // 8 + 2 * 4 * 64
    for result in (small, large):
        allowed = result["shard_bytes"] + result["largest_bytes"]
        assert result["predicted_peak_bytes"] == allowed
        assert result["materialize_s"] > 0
        assert result["normal_s"] >= 0


def test_the_benchmark_prints_a_table() -> None:
    lines = _run(
        "benchmarks/scale.py",
        *("--device", "cpu", "--model", "tiny", "--world", "8", "--rank", "3"),
    ).splitlines()
    assert lines[0].split()[:4] == ["model", "built", "world", "rank"]
    assert lines[1].split()[:4] == ["tiny", "meta", "8", "3"]

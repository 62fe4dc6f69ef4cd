"""The benchmark of accelerate, small and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RunScript = Callable[..., str]

pytestmark = [pytest.mark.hf, pytest.mark.slow]

TABLE = (
    *("benchmarks/accelerate_table.py", "--sharding", "one", "--shape", "tiny"),
    *("--config", "examples/accelerate/cpu.yaml", "--precision", "no"),
)


def test_all_ways_to_make_the_model_have_the_same_bits(
    tmp_path: Path, run_script: RunScript
) -> None:
    file = tmp_path / "rows.json"
    printed = run_script(*TABLE, "--recipe", "bf16", "--json", str(file))
    rows = json.loads(file.read_text())
    assert [row["way"] for row in rows] == ["deferred", "eager", "accelerate"]
    assert len({tuple(row["bits"]) for row in rows}) == 1
    assert all(row["trained"] == row["tensors"] == 20 for row in rows)
    assert printed.splitlines()[-1] == "deferred and eager: the same bits"


@pytest.mark.distributed
def test_under_fsdp2_all_ways_have_the_same_bits_too(
    tmp_path: Path, run_script: RunScript
) -> None:
    shim = Path(__file__).parent / "cpus_as_accelerators"
    path = os.pathsep.join((str(shim), str(Path(__file__).parents[2])))
    file = tmp_path / "rows.json"
    run_script(
        *("benchmarks/accelerate_table.py", "--sharding", "fsdp2", "--shape", "tiny"),
        *("--recipe", "bf16", "--json", str(file)),
        environment={"PYTHONPATH": path},
    )
    rows = json.loads(file.read_text())
    assert [row["way"] for row in rows] == ["deferred", "eager", "accelerate"]
    assert len({tuple(row["bits"]) for row in rows}) == 1
    assert all(row["trained"] == row["tensors"] == 20 for row in rows)


def test_at_the_limit_processes_in_sessions_of_their_own_end_too() -> None:
    psutil = pytest.importorskip("psutil")
    from benchmarks.accelerate_table import end_all

    code = (
        "import subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'], start_new_session=True)\n"
        "print(started.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        end_all(parent)
    assert parent.returncode == -9
    child.wait(5)
    assert not child.is_running()


def test_what_was_not_reached_is_a_row_that_says_so(
    tmp_path: Path, run_script: RunScript
) -> None:
    file = tmp_path / "rows.json"
    cases = ("--recipe", "fp8_current", "--json", str(file), "--limit-s", "0.5")
    printed = run_script(*TABLE, *cases, status=1)
    rows = json.loads(file.read_text())
    assert [row["error"] for row in rows] == ["not reached within 0.5 s"] * 2
    assert (
        printed.splitlines()[-1] == "fp8_current, one, eager: not reached within 0.5 s"
    )

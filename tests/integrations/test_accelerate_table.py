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

WAYS = ("deferred", "eager", "eager_again", "accelerate")
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
    assert [row["way"] for row in rows] == list(WAYS)
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
    assert [row["way"] for row in rows] == list(WAYS)
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
    assert [row["error"] for row in rows] == ["not reached within 0.5 s"] * 3
    last = "fp8_current, one, eager_again: not reached within 0.5 s"
    assert printed.splitlines()[-1] == last


def test_a_row_that_differs_is_named_and_so_is_training_that_does_not_repeat() -> None:
    from benchmarks.accelerate_table import differences

    def rows(deferred: str, eager: str, again: str) -> list[dict[str, object]]:
        case = {"recipe": "bf16", "sharding": "one", "tied": True}
        found = {"deferred": deferred, "eager": eager, "eager_again": again}
        return [{**case, "way": way, "bits": [bits]} for way, bits in found.items()]

    case = "('bf16', 'one', True)"
    assert differences(rows("a", "a", "a")) == []
    assert differences(rows("b", "a", "a")) == [
        f"{case}: deferred and eager differ: {{'deferred': ['b'], 'eager': ['a']}}"
    ]
    assert [line.split(" differ")[0] for line in differences(rows("a", "a", "b"))] == [
        f"{case}: eager and eager_again"
    ]


def test_what_is_compared_runs_together_and_accelerate_s_own_last() -> None:
    from argparse import Namespace

    from benchmarks.accelerate_table import cases_of

    recipes = ["bf16", "fp8_current", "fp8_delayed"]
    assert cases_of(Namespace(way=WAYS, recipe=recipes)) == [
        *((way, recipe) for recipe in recipes for way in WAYS[:3]),
        ("accelerate", "bf16"),
        ("accelerate", "fp8_delayed"),
    ]


def test_the_checksum_of_values_sees_one_bit_and_two_elements_that_swapped() -> None:
    import torch

    from benchmarks.accelerate_meters import checksum

    values = torch.arange(1000.0)
    swapped, flipped = values.clone(), values.clone()
    swapped[[3, 900]] = values[[900, 3]]
    flipped.view(torch.int32)[500] ^= 1
    assert checksum(values) == checksum(values.clone(), chunk=7)
    found = (values, swapped, flipped, values[:-1], values.reshape(10, 100).t())
    assert len({checksum(tensor) for tensor in found}) == len(found)
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_host_memory_is_what_was_held_at_most_and_watching_is_no_thread_of_ours() -> (
    None
):
    import threading

    import torch

    from benchmarks.accelerate_meters import HostPeak

    threads = threading.active_count()
    with HostPeak() as host:
        assert threading.active_count() == threads
        torch.ones(50_000_000)  # 200 MB, let go of at once
    assert 190e6 < host.growth < 300e6
    with HostPeak() as host:
        pass
    assert host.growth < 20e6

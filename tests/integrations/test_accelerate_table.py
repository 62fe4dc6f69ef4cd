"""The benchmark of accelerate, small and on the CPU."""

from __future__ import annotations

import json
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

"""The example runs under torchrun, and the benchmark on a fake process group."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]


def test_the_example_makes_the_same_parameters_on_any_number_of_processes(
    run_script: RunScript,
) -> None:
    one, two = (
        run_script("examples/fsdp2_torchrun.py", ranks=ranks).splitlines()
        for ranks in (1, 2)
    )
    assert one[-1].startswith("parameters ")
    assert two[-1] == one[-1]
    assert two[-2].endswith("ready: True")
    assert float(two[1].split()[-1]) < float(two[0].split()[-1]) + 1


def test_the_trainer_prints_the_same_on_every_mesh(run_script: RunScript) -> None:
    script = "examples/trainer_torchrun.py"
    one = run_script(script, ranks=1).splitlines()
    assert one[0].startswith("initial values ")
    assert one[-1] == "loaded as it was saved: True"
    for tp in ("1", "2"):
        two = run_script(script, "--tp", tp, ranks=2).splitlines()
        assert two[0] == one[0]
        assert two[-1] == one[-1]
        for line, expected in zip(two[1:-1], one[1:-1], strict=True):
            numbers = [
                [float(number) for number in re.findall(r"\d+\.\d+", text)]
                for text in (line, expected)
            ]
            assert len(numbers[0]) == 2
            assert numbers[0] == pytest.approx(numbers[1], abs=2e-3)
    assert float(one[-2].split()[3][:-1]) < float(one[1].split()[3][:-1])


@pytest.mark.parametrize("built", ["meta", "recorded"])
def test_the_benchmark_measures_one_rank_of_many(
    built: str, run_script: RunScript, tmp_path: Path
) -> None:
    file = tmp_path / "scale.json"
    run_script(
        "benchmarks/scale.py",
        *("--device", "cpu", "--model", "tiny", "--built", built),
        *("--world", "8", "--world", "64", "--json", str(file)),
    )
    small, large = json.loads(file.read_text())
    assert small["parameters"] == large["parameters"] == 78144
    assert small["shard_bytes"] == 2 * 78144 // 8
    assert large["shard_bytes"] <= small["shard_bytes"] // 8 + 2 * 4 * 64
    for result in (small, large):
        allowed = result["shard_bytes"] + result["largest_bytes"]
        assert result["predicted_peak_bytes"] == allowed
        assert result["materialize_s"] > 0
        assert result["normal_s"] >= 0


def test_the_benchmark_prints_a_table(run_script: RunScript) -> None:
    lines = run_script(
        "benchmarks/scale.py",
        *("--device", "cpu", "--model", "tiny", "--world", "8", "--rank", "3"),
    ).splitlines()
    assert lines[0].split()[:4] == ["model", "built", "world", "rank"]
    assert lines[1].split()[:4] == ["tiny", "meta", "8", "3"]

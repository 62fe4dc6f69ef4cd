"""The example runs under torchrun, and the benchmark on a fake process group."""

from __future__ import annotations

import json
from collections.abc import Callable

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


@pytest.mark.parametrize("built", ["meta", "recorded"])
def test_the_benchmark_measures_one_rank_of_many(
    built: str, run_script: RunScript
) -> None:
    lines = run_script(
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


def test_the_benchmark_prints_a_table(run_script: RunScript) -> None:
    lines = run_script(
        "benchmarks/scale.py",
        *("--device", "cpu", "--model", "tiny", "--world", "8", "--rank", "3"),
    ).splitlines()
    assert lines[0].split()[:4] == ["model", "built", "world", "rank"]
    assert lines[1].split()[:4] == ["tiny", "meta", "8", "3"]

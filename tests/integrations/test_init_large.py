"""The scripts for large models: a plan without memory, and small sizes for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deferred_init as di

pytest.importorskip("transformers")

RunScript = Callable[..., str]

pytestmark = [pytest.mark.hf, pytest.mark.slow]


def test_the_plan_of_405_billion_parameters_says_what_a_rank_keeps(
    run_script: RunScript,
) -> None:
    out = run_script(
        *("examples/init_large/llama3.py", "--size", "405b", "--recipe", "bf16"),
        *("--plan", "--gpu", "h200", "--world-size", "512"),
    )
    assert "405,853,388,800 parameters" in out
    assert "each of 512 ranks keeps 1,585,398,080 bytes" in out
    assert "fits: the peak is" in out


@pytest.mark.distributed
def test_a_seed_checkpoint_is_the_same_for_any_number_of_ranks(
    tmp_path: Path, run_script: RunScript
) -> None:
    script = ("examples/init_large/llama3.py", "--size", "tiny", "--seed", "3")
    for ranks in (1, 2, 4):
        run_script(*script, "--save", str(tmp_path / str(ranks)), ranks=ranks)
    from examples.init_large.llama3 import llama3_tiny

    model = di.deferred_init(llama3_tiny)
    di.materialize(model, "cpu", seed=3)
    eager = model.state_dict()
    for name in ("1", "2", "4"):
        state = {"model": {key: torch.empty_like(v) for key, v in eager.items()}}
        with pytest.warns(UserWarning, match="torch.distributed"):
            dcp.load(state, checkpoint_id=tmp_path / name)
        for key, value in eager.items():
            assert torch.equal(state["model"][key], value), (name, key)


def test_a_mixture_of_experts_is_made_for_real(run_script: RunScript) -> None:
    out = run_script("examples/init_large/deepseek_v3.py", "--size", "tiny")
    assert "Materialized: ready" in out

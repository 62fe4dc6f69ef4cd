"""The scripts for large models: a plan without memory, and small sizes for real."""

from __future__ import annotations

import importlib
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


def _compare(folder: Path, eager: dict[str, torch.Tensor]) -> None:
    """Compare what a checkpoint holds with a model, bit for bit."""
    state = {"model": {key: torch.empty_like(v) for key, v in eager.items()}}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(state, checkpoint_id=folder)
    for key, value in eager.items():
        assert torch.equal(state["model"][key], value), (folder.name, key)


def _saved(script: str, tmp_path: Path, run_script: RunScript) -> list[Path]:
    """Write a seed checkpoint with 1, 2 and 4 ranks."""
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 4)]
    for folder in folders:
        options = ("--size", "tiny", "--seed", "3", "--save", str(folder))
        out = run_script(
            f"examples/init_large/{script}.py", *options, ranks=int(folder.name)
        )
        assert "Materialized: ready" in out
    return folders


@pytest.mark.distributed
@pytest.mark.parametrize("script", ["llama3", "deepseek_v3"])
def test_a_seed_checkpoint_is_eager_construction_for_any_number_of_ranks(
    script: str, tmp_path: Path, run_script: RunScript
) -> None:
    folders = _saved(script, tmp_path, run_script)
    module = importlib.import_module(f"examples.init_large.{script}")
    torch.manual_seed(3)
    eager = getattr(module, f"{script}_tiny")().state_dict()
    for folder in folders:
        _compare(folder, eager)


@pytest.mark.distributed
@pytest.mark.te
def test_a_seed_checkpoint_of_te_layers_is_the_same_for_any_number_of_ranks(
    tmp_path: Path, run_script: RunScript
) -> None:
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        pytest.skip(f"Transformer Engine cannot be imported: {error}")
    folders = _saved("gpt_te", tmp_path, run_script)
    module = importlib.import_module("examples.init_large.gpt_te")
    with di.on_meta():
        model = module.gpt_tiny()
    di.materialize(model, "cpu", seed=3)
    made = {
        key: value
        for key, value in model.state_dict().items()
        if not key.endswith("_extra_state")
    }
    assert made["layers.1.layernorm_mlp.fc1_weight"].std() > 0
    assert made["head.weight"].equal(made["embed.weight"])
    for folder in folders:
        _compare(folder, made)


def test_a_checkpoint_with_other_values_would_be_noticed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path)
    with pytest.raises(AssertionError):
        _compare(tmp_path, {"weight": torch.zeros(3)})

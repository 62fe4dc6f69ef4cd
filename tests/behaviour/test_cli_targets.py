"""The command line: hardware that is not here, folders as targets, seed checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.cli import main
from tests.behaviour.cli_targets import printed_json, write_module

TARGETS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

def large():
    return nn.Linear(200_000, 250_000, bias=False)

def two():
    return Tied(), Tied()
"""


@pytest.fixture
def targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    return write_module(TARGETS, tmp_path, monkeypatch, request)


def test_a_model_that_does_not_fit_is_exit_code_1(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    large = f"{targets}:large"
    assert main(["plan", large, "--gpu", "H100", "--json"]) == 1
    answer = printed_json(capsys)
    assert (answer["ok"], answer["fits"]) == (False, False)
    assert answer["peak_bytes"] == 200_000 * 250_000 * 4
    assert main(["plan", large, "--gpu", "h100"]) == 1
    assert "DOES NOT FIT: the peak is 250.0 % of the 80.00 GB" in (
        capsys.readouterr().out
    )


def test_ranks_share_what_one_device_cannot_hold(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", f"{targets}:large", "--gpu", "h200", "--recipe", "bf16", "--json"]
    assert main([*line, "--world-size", "8"]) == 1
    answer = printed_json(capsys)
    assert answer["rank_bytes"] == 250_000 // 8 * 200_000 * 2
    assert (
        "`weight` is made, of which each rank keeps its part" in (answer["peak_reason"])
    )


def test_what_the_gpu_cannot_run_is_exit_code_1(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", f"{targets}:Tied", "--recipe", "nvfp4", "--json"]
    assert main([*line, "--gpu", "h200"]) == 1
    assert (
        "`NVFP4BlockScaling` needs compute capability 10.0"
        in printed_json(capsys)["error"]
    )
    assert main([*line, "--gpu", "b200"]) == 0


def test_a_gpu_for_the_cpu_is_exit_code_2(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", f"{targets}:Tied", "--gpu", "h200", "--device", "cpu"]
    assert main(line) == 2
    assert "--gpu needs --device cuda, found cpu" in capsys.readouterr().err


@pytest.mark.parametrize("file_format", ["safetensors", "dcp"])
def test_a_seed_checkpoint_holds_the_values_of_eager_construction(
    targets: str, capsys: pytest.CaptureFixture[str], file_format: str
) -> None:
    import importlib

    line = ["materialize", f"{targets}:Tied", "--out", "seed", "--seed", "3"]
    assert main([*line, "--format", file_format, "--json"]) == 0
    answer = printed_json(capsys)
    assert answer["ok"] is True
    assert answer["files"] == sorted(path.name for path in Path("seed").iterdir())
    build = importlib.import_module(targets).Tied
    torch.manual_seed(3)
    eager = build()
    loaded = di.deferred_init(build)
    di.materialize(loaded, "cpu", weights="seed", missing="error")
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.embed.weight, eager.embed.weight)


def test_a_seed_checkpoint_takes_its_values_from_a_policy(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    assert main(["plan", f"{targets}:Tied", "--device", "cpu", "--rng", "fast"]) == 0
    assert "rng=fast" in capsys.readouterr().out
    line = ["materialize", f"{targets}:Tied", "--out", "seed", "--seed", "3"]
    assert main([*line, "--rng", "fast"]) == 0
    build = importlib.import_module(targets).Tied
    loaded, made = di.deferred_init(build), di.deferred_init(build)
    di.materialize(loaded, "cpu", weights="seed", missing="error")
    di.materialize(made, "cpu", seed=3, rng="fast")
    assert torch.equal(loaded.embed.weight, made.embed.weight)


def test_a_report_is_saved_beside_the_checkpoint(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["materialize", f"{targets}:Tied", "--out", "seed", "--report", "r.html"]
    assert main(line) == 0
    assert "saved model.safetensors in seed" in capsys.readouterr().out
    assert Path("r.html").read_text().startswith("<!doctype html>")


def test_a_folder_that_holds_something_is_exit_code_2_before_any_work(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("seed").mkdir()
    (Path("seed") / "other").touch()
    assert main(["materialize", f"{targets}:Tied", "--out", "seed"]) == 2
    assert "'seed' must be a new or an empty folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_exit_code_2_before_any_work(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main(["materialize", f"{targets}:Tied", "--out", "file/seed"]) == 2
    assert "'file/seed' cannot be made in '" in capsys.readouterr().err


def test_several_models_are_no_seed_checkpoint(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["materialize", f"{targets}:two", "--out", "seed"]) == 2
    assert "holds one model, found 2" in capsys.readouterr().err
    assert not Path("seed").exists()


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.hf
@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_hugging_face_folder_and_its_config_are_targets(
    gpt2_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target = str(gpt2_folder / name)
    assert main(["plan", target, "--json"]) == 0
    made = {tensor["fqn"] for tensor in printed_json(capsys)["tensors"]}
    assert "transformer.h.0.attn.c_attn.weight" in made
    assert main(["audit", target]) == 0
    assert "Audit: ready" in capsys.readouterr().out


@pytest.mark.hf
def test_a_config_without_an_architecture_gives_the_base_model(
    gpt2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((gpt2_folder / "config.json").read_text())
    del data["architectures"]
    (gpt2_folder / "config.json").write_text(json.dumps(data))
    assert main(["plan", str(gpt2_folder), "--json"]) == 0
    assert "h.0.attn.c_attn.weight" in capsys.readouterr().out


@pytest.mark.hf
def test_a_seed_checkpoint_of_a_hugging_face_model_loads_there(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    import transformers

    out = tmp_path / "seed"
    assert main(["materialize", str(gpt2_folder), "--out", str(out)]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.manual_seed(0)
    eager = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(out))
    assert isinstance(eager, nn.Module)
    for (name, one), other in zip(
        loaded.named_parameters(), eager.parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.hf
@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", "is no model configuration"), (None, "there is no file")],
)
def test_a_folder_without_a_configuration_is_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    expected: str,
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path)]) == 2
    assert expected in capsys.readouterr().err


def test_bench_times_eager_and_deferred_construction(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", f"{targets}:Tied", "--repeats", "3"]
    assert main([*line, "--json"]) == 0
    answer = printed_json(capsys)
    assert answer["final_bytes"] == 10 * 4 * 4
    assert {name: len(values) for name, values in answer["seconds"].items()} == {
        "eager": 3,
        "construct": 3,
        "materialize": 3,
    }
    for name, values in answer["seconds"].items():
        assert answer["median_s"][name] == sorted(values)[1] > 0
    assert main(line) == 0
    assert "median of 3 runs after one that does not count" in capsys.readouterr().out


def test_bench_refuses_no_repeats(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", f"{targets}:Tied", "--repeats", "0"])
    assert caught.value.code == 2
    assert "must be at least 1, found 0" in capsys.readouterr().err

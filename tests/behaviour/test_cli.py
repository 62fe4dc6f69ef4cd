"""The command line, run as a person would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deferred_init.cli import main
from tests.behaviour.cli_targets import printed_json, write_module

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("demo", "plan", "materialize", "bench", "audit", "recipes", "doctor")

TARGETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))

def several():
    return [build(), build()]

def with_optimizer():
    model = build()
    return model, torch.optim.AdamW(model.parameters())

def with_foreign_optimizer():
    return build(), torch.optim.AdamW(build().parameters())

class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.strange = nn.Parameter(torch.empty(3, device="meta"))

def number():
    return 3

def nothing():
    return ()

def with_argument(width):
    return nn.Linear(width, width)
"""


@pytest.fixture
def targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """Write a module of targets into an empty current folder and return its name."""
    return write_module(TARGETS, tmp_path, monkeypatch, request)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example_and_the_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert f"example: deferred-init {command}" in text
    assert "exit codes: 0, all is well; 1, something is wrong" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_is_a_command_line_that_parses(command: str) -> None:
    from deferred_init.cli import _parser

    parser = _parser()
    subparsers = next(a for a in parser._actions if a.dest == "command")
    assert subparsers.choices is not None
    epilog = dict(subparsers.choices)[command].epilog  # type: ignore[call-overload]
    example = epilog.splitlines()[1].split()
    assert parser.parse_args(example[1:]).command == command


def test_no_command_is_an_error_of_the_command_line() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deferred_init", "recipes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "fp8_current  FP8 weights and GEMMs" in done.stdout


def test_recipes_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    listed = {recipe["name"]: recipe for recipe in printed_json(capsys)}
    assert len(listed) == 10
    assert listed["nvfp4"]["min_compute_capability"] == [10, 0]
    assert listed["bf16"]["te_recipe"] is None


def test_recipes_explains_a_composition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "fp8_block+gpt2"]) == 0
    text = capsys.readouterr().out
    assert "Transformer Engine's Float8BlockScaling, compute capability 9.0+." in text
    assert "Weights are stored quantized." in text
    assert "*.c_proj.weight: normal(std=0.02), times 1/sqrt(2*num_layers)" in text
    assert "* of 2 or more dimensions: normal(std=0.02)" in text
    assert 'name = "fp8_block+gpt2"' in text


def test_recipes_explains_what_needs_no_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "llama"]) == 0
    assert "needs no particular hardware" in capsys.readouterr().out


def test_an_unknown_recipe_is_exit_code_1_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "gpt3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "deferred-init: no recipe is called `gpt3`; did you mean `gpt2`?" in (
        captured.err
    )


def test_an_error_with_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "gpt3", "--json"]) == 1
    answer = printed_json(capsys)
    assert answer["ok"] is False
    assert answer["error"].startswith("no recipe is called `gpt3`")
    assert answer["problems"] == []


def test_doctor_names_versions_and_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from importlib import metadata

    import torch

    # Builds whose version on the index has no "+cu132" say it in `__version__` alone.
    version = metadata.version("torch")
    assert torch.__version__.startswith(version)
    assert main(["doctor", "--json"]) == 0
    answer = printed_json(capsys)
    assert answer["ok"] is True
    assert answer["packages"]["torch"] == version
    assert len(answer["gpus"]) == torch.cuda.device_count()
    assert main(["doctor"]) == 0
    assert f"torch               {version}" in capsys.readouterr().out


def test_doctor_reports_a_transformer_engine_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: x')")
    done = subprocess.run(
        [sys.executable, "-m", "deferred_init", "doctor"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (
        "PROBLEM: Transformer Engine is installed but cannot be imported: undefined "
        "symbol: x." in done.stdout
    )


def test_plan_describes_a_model_for_a_gpu_that_is_not_there(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{targets}:build", "--json"]) == 0
    answer = printed_json(capsys)
    assert answer["ok"] is True
    assert answer["device"] == "cuda"
    assert answer["final_bytes"] == 4 * (8 * 4 + 4 + 4 + 4)
    assert main(["plan", f"{targets}:build", "--recipe", "bf16"]) == 0
    assert "88 bytes" in capsys.readouterr().out


def test_plan_names_what_could_not_be_made(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{targets}:Unknown", "--json"]) == 1
    answer = printed_json(capsys)
    assert answer["ok"] is False
    assert "`strange` (parameter of `Unknown`)" in answer["error"]
    assert answer["problems"] == [answer["error"]]
    assert main(["plan", f"{targets}:Unknown"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"deferred-init: {answer['error']}\n"
    assert captured.out == ""


def test_audit_is_silent_on_a_healthy_model(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for function in ("build", "several", "with_optimizer"):
        assert main(["audit", f"{targets}:{function}", "--json"]) == 0
        assert printed_json(capsys)["findings"] == []


def test_audit_finds_an_optimizer_of_another_model(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", f"{targets}:with_foreign_optimizer", "--json"]) == 1
    assert printed_json(capsys)["findings"] != []
    assert main(["audit", f"{targets}:with_foreign_optimizer"]) == 1


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("{}", "a target has the form package.module:function, found '"),
        ("{}:", "a target has the form package.module:function, found '"),
        ("no_such_module:build", "no module is called 'no_such_module'"),
        ("{}.inner:build", "no module is called '"),
        ("./{}.py:build", "a file is given as its module, "),
        ("./no_such_folder", "may also be a folder of Hugging Face's"),
        ("{}:biuld", "has no function 'biuld'; did you mean `build`?"),
        ("{}:with_argument", "cannot be called without arguments: missing a required"),
        ("{}:number", "must return a model, or models and optimizers, found int"),
        ("{}:nothing", "must return a model, or models and optimizers, found no model"),
    ],
)
def test_a_target_that_cannot_be_used_is_exit_code_2(
    targets: str, capsys: pytest.CaptureFixture[str], target: str, expected: str
) -> None:
    assert main(["audit", target.format(targets)]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_a_target_whose_own_import_fails_shows_that_error(
    targets: str, tmp_path: Path
) -> None:
    (tmp_path / f"{targets}_broken.py").write_text("import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        main(["plan", f"{targets}_broken:build"])


@pytest.mark.parametrize("value", ["0", "-1"])
def test_the_demo_refuses_sizes_below_one(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", value])
    assert caught.value.code == 2
    assert f"must be at least 1, found {value}" in capsys.readouterr().err

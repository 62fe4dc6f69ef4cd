"""A script for accelerate changes by the three lines that the documentation shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RunScript = Callable[..., str]

pytestmark = [pytest.mark.hf, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BEFORE = ROOT / "examples" / "accelerate" / "complete_nlp.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file")
CPU = (*LAUNCH, "examples/accelerate/cpu.yaml")


def _diff() -> list[str]:
    page = (ROOT / "docs" / "accelerate.md").read_text()
    return page.partition("```diff\n")[2].partition("```")[0].splitlines()


def _apply(lines: list[str], diff: list[str]) -> list[str]:
    """Apply a unified diff; every line of it has to be where it says."""
    made, read = [], 0
    for line in diff:
        hunk = re.match(r"@@ -(\d+)", line)
        if hunk:
            start = int(hunk[1]) - 1
            made += lines[read:start]
            read = start
        elif line.startswith("+"):
            made.append(line[1:])
        else:
            assert lines[read] == line[1:], (read + 1, lines[read], line)
            made += [lines[read]] if line.startswith(" ") else []
            read += 1
    return made + lines[read:]


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("after") / "complete_nlp.py"
    made = _apply(BEFORE.read_text().splitlines(), _diff())
    file.write_text("\n".join(made) + "\n")
    return file


def test_at_most_three_lines_change() -> None:
    assert sum(line.startswith("+") for line in _diff()) == 3
    assert sum(line.startswith("-") for line in _diff()) <= 3


def _final(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def test_both_versions_print_the_same_and_leave_the_same_model(
    tmp_path: Path, after: Path, run_script: RunScript
) -> None:
    printed = {}
    for name, script in (("before", BEFORE), ("after", after)):
        options = ("--output_dir", str(tmp_path / name), "--checkpointing_steps", "30")
        printed[name] = run_script(*CPU, str(script), *options)
    assert printed["before"].count("epoch") == 2
    assert printed["before"] == printed["after"]
    assert _final(tmp_path / "before") == _final(tmp_path / "after")
    for name, script, other in (("one", BEFORE, "after"), ("two", after, "before")):
        options = ("--output_dir", str(tmp_path / name), "--resume_from_checkpoint")
        resumed = (*options, str(tmp_path / other / "step_30"))
        printed[name] = run_script(*CPU, str(script), *resumed)
    assert printed["one"].startswith("epoch 1: ")
    assert printed["one"] == printed["two"]
    assert _final(tmp_path / "one") == _final(tmp_path / "two")


@pytest.mark.distributed
def test_both_versions_print_the_same_on_two_ranks(
    after: Path, run_script: RunScript
) -> None:
    cpu = {"ACCELERATE_USE_CPU": "true"}
    ddp = (*LAUNCH, "examples/accelerate/ddp.yaml", "--mixed_precision", "no")
    printed = [run_script(*ddp, str(s), environment=cpu) for s in (BEFORE, after)]
    assert printed[0].count("epoch") == 2
    assert printed[0] == printed[1]


def test_a_diff_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match="another line"):
        _apply(["a", "b"], ["@@ -2,1 +2,1 @@", "-another line", "+c"])
    assert _apply(["a", "b"], ["@@ -2,1 +2,1 @@", "-b", "+c"]) == ["a", "c"]

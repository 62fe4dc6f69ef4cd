"""Wrong arguments end in one line and exit code 2, before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from deferred_init.cli import main

TARGET = "torch.nn:Identity"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [["plan", TARGET], ["bench", TARGET], ["materialize", TARGET, "--out", "seed"]],
)
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("foo", "--device takes cpu, cuda, cuda:1 and the like, found 'foo'"),
        ("meta", "--device meta: device must have memory"),
    ],
)
def test_a_device_that_is_none(
    line: list[str],
    device: str,
    expected: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*line, "--device", device]) == 2
    assert _only_line(capsys).startswith(f"deferred-init: {expected}")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "line",
    [["bench", TARGET], ["materialize", TARGET, "--out", "seed"], ["demo"]],
    ids=lambda line: line[0],
)
def test_what_makes_a_model_needs_a_device_that_is_here(
    line: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    assert main([*line, "--device", missing]) == 2
    said = _only_line(capsys)
    assert said.startswith(f"deferred-init: --device {missing}: device '{missing}' was")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("r.pdf", "a report is saved as .html, .json, .txt or .png, found 'r.pdf'"),
        ("none/r.html", "there is no folder 'none' for the report 'none/r.html'"),
        ("there.txt", "a report is saved in a file, and 'there.txt' is a folder"),
    ],
)
def test_a_report_that_could_not_be_saved_is_refused_before_the_work(
    file: str,
    expected: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "there.txt").mkdir()
    line = ["materialize", "torch.nn:PReLU", "--out", "seed", "--report", file]
    assert main(line) == 2
    assert _only_line(capsys).startswith(f"deferred-init: {expected}")
    assert [found.name for found in folder.iterdir()] == ["there.txt"]


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = ["materialize", "torch.nn:PReLU", "--out", "seed", "--report", "r.png"]
    assert main(line) == 2
    assert "a picture needs matplotlib, which is not installed" in _only_line(capsys)
    assert not list(folder.iterdir())


def test_a_picture_of_nothing_is_refused_before_anything_is_saved(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert main(["materialize", TARGET, "--out", "seed", "--report", "r.png"]) == 2
    assert _only_line(capsys) == (
        "deferred-init: --report r.png: Identity has no deferred tensor, so there is "
        "no curve to draw; take .html, .json or .txt"
    )
    assert not list(folder.iterdir())


def test_a_report_may_lie_beside_the_weights_in_a_new_folder(folder: Path) -> None:
    line = ["materialize", "torch.nn:PReLU", "--out", "seed", "--report", "seed/r.txt"]
    assert main(line) == 0
    assert (folder / "seed" / "r.txt").read_text()


def _only_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line

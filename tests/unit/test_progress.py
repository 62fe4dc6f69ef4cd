"""The progress bar: in bytes, on request, and on one rank."""

from __future__ import annotations

import pytest
from torch import nn

import deferred_init as di


def _shown(capsys: pytest.CaptureFixture[str], progress: bool | None) -> str:
    model = nn.Linear(64, 64, device="meta")
    di.materialize(model, "cpu", seed=0, progress=progress)
    return capsys.readouterr().err


def test_a_bar_that_was_asked_for_ends_at_all_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    shown = _shown(capsys, True)
    assert shown.rpartition("\r")[2].startswith("materialize: 100%")
    assert "16.6k/16.6k" in shown  # (64 + 1) x 64 elements of 4 bytes


@pytest.mark.parametrize("progress", [False, None])
def test_nothing_is_shown_unasked_where_there_is_no_terminal(
    progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _shown(capsys, progress) == ""


def test_only_the_first_rank_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _shown(capsys, True) == ""

"""Modules for the command line to find, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def write_module(
    source: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> str:
    """Write a module into a folder, make that the current one, and name the module.

    No two tests use the same name, since Python keeps what it has imported.
    """
    name = f"targets_{abs(hash(request.node.nodeid))}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return name


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)

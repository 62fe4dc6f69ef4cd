"""The README: its commands are those that CI runs, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _command(name: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / ".ci" / "readme_commands.py"
    return subprocess.run(
        [sys.executable, str(script), name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["demo", "tests"])
def test_both_commands_stand_on_the_first_screen_in_one_line(name: str) -> None:
    command = _command(name).stdout.rstrip("\n")
    first_screen = README.splitlines()[:30]
    assert command in first_screen


def test_a_command_that_the_readme_lacks_is_an_error() -> None:
    done = _command("deploy")
    assert done.returncode == 1
    assert "README.md has no command 'deploy'; it has ['demo', 'tests']" in done.stderr


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for name in ("demo", "tests"):
        assert f"readme_command {name}" in script


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
)
def test_a_python_example_of_the_readme_runs_as_it_stands(block: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["report"].ok


def test_every_relative_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_extra_that_the_readme_names_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'"\.\[(\w+)\]"', README))
    assert named == {"hf", "test"}
    assert named <= set(re.findall(r"^(\w+) = \[", project, flags=re.MULTILINE))


def test_every_command_that_the_readme_lists_exists() -> None:
    from deferred_init.cli import main

    for name in sorted(set(re.findall(r"`deferred-init (\w+)", README))):
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0

"""The examples in the docstrings of the package run and give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _has_examples(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(">>> " in line and "+SKIP" not in line for line in lines)


_FILES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "deferred_init").rglob("*.py"))
    if _has_examples(path)
]


def _import(path: Path) -> ModuleType:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("deferred_init"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("path", _FILES, ids=str)
def test_the_examples_of_a_module_give_what_they_say(path: Path) -> None:
    done = doctest.testmod(_import(path), verbose=False)
    assert done.attempted > 0
    assert done.failed == 0


def test_an_example_that_gives_something_else_is_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module).failed == 1
    assert "Expected:\n    3" in capsys.readouterr().out

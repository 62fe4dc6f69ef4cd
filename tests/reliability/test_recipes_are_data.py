"""A recipe is data: hostile ones are refused, import nothing, and cost little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deferred_init as di

ROOT = Path(__file__).resolve().parents[2]

HOSTILE = {
    "a function to call": '[quantization]\nte_recipe = "os:system"\n',
    "a class to make": '[quantization]\nte_recipe = "subprocess.Popen"\n',
    "an unknown table": '[import]\nmodule = "os"\n',
    "deep nesting": "x = " + "[" * 5000 + "]" * 5000 + "\n",
    "a huge number": "x = " + "9" * 10_000 + "\n",
    "no TOML": "\x00\x01\x02",
    "a path for a name": 'extends = "../../../../etc/passwd"\n',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_recipe_is_refused_by_name(what: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(HOSTILE[what])
    with pytest.raises((di.DeferredInitError, ValueError, TypeError)) as caught:
        di.Recipe.load(str(path))
    assert "hostile" in str(caught.value)


@given(st.text(max_size=200))
def test_no_text_crashes_the_reader_of_recipes(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.toml")
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            di.Recipe.load(str(path))
        except (di.DeferredInitError, ValueError, TypeError) as error:
            assert str(error)  # noqa: PT017 - either way is right


_IMPORTS = """
import sys
import deferred_init as di
from torch import nn
di.Recipe.load("bf16")
before = set(sys.modules)
try:
    di.Recipe.load(sys.argv[1])
except (di.DeferredInitError, ValueError, TypeError):
    pass
print(sorted(name for name in set(sys.modules) - before if "antigravity" in name))
"""


def test_reading_a_recipe_imports_nothing_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "imports.toml"
    path.write_text('[quantization]\nte_recipe = "antigravity:x"\n[init]\nx = "y"\n')
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]"

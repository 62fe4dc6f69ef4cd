"""How `.ci/versions` builds Transformer Engine where nothing of it is there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "PyMODINIT_FUNC PyInit_transformer_engine_torch() {{ {body} }}"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    path = ROOT / ".ci" / "te_extension.py"
    spec = importlib.util.spec_from_file_location("te_extension", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "te_extension", module)
    spec.loader.exec_module(module)
    return module


def test_libraries_are_found_in_the_environment(script: Any, tmp_path: Path) -> None:
    assert script.variables(tmp_path) == {}
    for folder in ("cudnn/lib", "cu13/lib", "nccl/lib", "cutlass"):
        (tmp_path / "nvidia" / folder).mkdir(parents=True)
    nvidia = tmp_path / "nvidia"
    assert script.variables(tmp_path) == {
        "LD_LIBRARY_PATH": f"{nvidia}/cu13/lib:{nvidia}/cudnn/lib:{nvidia}/nccl/lib",
        "CUDNN_HOME": f"{nvidia}/cudnn",
        "CUDA_HOME": f"{nvidia}/cu13",
    }


def test_torch_without_cuda_is_refused_before_anything_is_installed(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = script.Layout("", str(tmp_path), ".so", [], [])
    monkeypatch.setattr(script, "layout", lambda python: nowhere)
    with pytest.raises(script.CannotBuildError, match="installed without CUDA"):
        script.install(Path(sys.executable), "2.9.0")


def test_an_environment_is_asked_where_its_things_lie(script: Any) -> None:
    where = script.layout(Path(sys.executable))
    assert where.site == sysconfig.get_path("purelib")
    assert any((Path(each) / "torch").is_dir() for each in where.headers)
    assert any(Path(each, "libc10.so").exists() for each in where.libraries)


def _sources(folder: Path, body: str) -> Path:
    """Two files in two folders, of which one needs the other's header."""
    (folder / "csrc" / "deeper").mkdir(parents=True)
    (folder / "csrc" / "name.h").write_text("int answer();\n")
    (folder / "csrc" / "deeper" / "a.cpp").write_text(
        '#include "name.h"\nint answer() { return 42; }\n'
    )
    module = "static PyModuleDef def = {PyModuleDef_HEAD_INIT, TORCH_EXTENSION};\n"
    (folder / "csrc" / "b.cpp").write_text(
        "#include <Python.h>\n#define TEXT_OF(x) #x\n#define TEXT(x) TEXT_OF(x)\n"
        "#define TORCH_EXTENSION TEXT(TORCH_EXTENSION_NAME)\n"
        f'#include "name.h"\n{module}{PROGRAM.format(body=body)}\n'
    )
    return folder


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_sources_in_several_files_become_one_extension(
    script: Any, tmp_path: Path
) -> None:
    body = (
        "PyObject* made = PyModule_Create(&def);\n"
        'PyModule_AddIntConstant(made, "answer", answer());\nreturn made;'
    )
    asked = script.layout(Path(sys.executable))
    site = tmp_path / "site"
    site.mkdir()
    where = script.Layout(
        asked.cuda, str(site), asked.suffix, asked.headers, asked.libraries
    )
    script.compile_in_one(_sources(tmp_path / "sources", body), where)
    code = "import torch, transformer_engine_torch as t; print(t.__name__, t.answer)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=site,
    )
    assert told.stdout == "transformer_engine_torch 42\n", told.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_what_a_compiler_says_is_the_reason(script: Any, tmp_path: Path) -> None:
    asked = script.layout(Path(sys.executable))
    sources = _sources(tmp_path, "return unknown_name;")
    with pytest.raises(script.CannotBuildError, match=r"error: .*unknown_name"):
        script.compile_in_one(sources, asked)


def test_a_compiler_that_is_not_there_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    where = script.Layout("13.0", str(tmp_path), ".so", [], [])
    with pytest.raises(script.CannotBuildError, match="there is no no-such-compiler"):
        script.compile_in_one(_sources(tmp_path / "sources", ""), where)


def test_the_row_builds_the_oldest_release_that_pyproject_names() -> None:
    oldest = re.search(
        r'"transformer-engine\[.*\]>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert oldest is not None
    row = (ROOT / ".ci" / "version_matrix.py").read_text().partition("te-oldest")[2]
    assert f'te="{oldest[1]}.0"' in row

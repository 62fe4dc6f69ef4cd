"""Look in the sources of Transformer Engine's releases for the names we use.

Usage: te_releases.py [VERSION ...]. A release's Python sources are in a small wheel; it
is downloaded and read, and nothing of it is imported or built, so neither a GPU nor a
compiler is needed. Fails if a release lacks a private name that the list does not say
it may, or a name that a handler imports when it is loaded.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The oldest for CUDA 12, the oldest that pyproject.toml names, and the newest.
VERSIONS = ("2.7.0", "2.9.0", "2.20.2")


def te_names() -> tuple[Any, ...]:
    """Return our list, which is plain data, without importing the package's torch."""
    package = types.ModuleType("deferred_init")
    package.__path__ = [str(ROOT / "deferred_init")]
    sys.modules.setdefault("deferred_init", package)
    module = importlib.import_module("deferred_init.private_names.te_names")
    return tuple(module.TE_NAMES)


def imported_names() -> tuple[Any, ...]:
    """Return what our modules import from Transformer Engine when they are loaded."""
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "deferred_init").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.startswith("transformer_engine"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found[name] = types.SimpleNamespace(
                        module=node.module, name=alias.name, path=name, only_in=""
                    )
    return tuple(found.values())


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Names that a file defines, imports or stores as attributes, and its strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name.rpartition(".")[2])
            case ast.Constant(value=str()):
                found.add(node.value)
    return frozenset(found)


def is_in(sources: Path, name: Any) -> bool:
    """Whether a release has a name: its beginning in its module, its end anywhere."""
    path = sources.joinpath(*name.module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return False
    first, *rest = name.name.split(".")
    if first not in defined(file):
        return False
    everywhere = (sources / "transformer_engine").rglob("*.py")
    return not rest or any(rest[-1] in defined(each) for each in everywhere)


def checked(sources: Path, names: Iterable[Any]) -> tuple[str, list[str]]:
    """Return a line of figures, and the paths that must be there and are not."""
    absent = [name for name in names if not is_in(sources, name)]
    failing = [name.path for name in absent if not name.only_in]
    allowed = len(absent) - len(failing)
    total = len(list(names))
    said = f"{total - len(absent)} of {total} names, {allowed} may be absent"
    return f"{said}, {len(failing)} are missing", failing


def unpacked(version: str, folder: Path) -> Path | None:
    """Download a release's sources; None where that fails."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), f"transformer-engine=={version}"],
        capture_output=True,
    )
    if done.returncode:
        return None
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def main() -> int:
    """Check the releases of the command line, or those that we name."""
    names = [*te_names(), *imported_names()]
    failed = False
    for version in sys.argv[1:] or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            sources = unpacked(version, Path(folder))
            if sources is None:
                print(f"!!! Transformer Engine {version}: SKIPPED: not to be had")
                continue
            said, failing = checked(sources, names)
            print(f"Transformer Engine {version}: {said}")
            for path in failing:
                failed = True
                print(f"!!! Transformer Engine {version} has no {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

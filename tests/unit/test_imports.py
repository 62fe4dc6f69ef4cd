"""What importing the package does, and which module may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import deferred_init

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deferred_init"

PUBLIC_NAMES = [
    "AuditError",
    "DeferredInitError",
    "MaterializeError",
    "Plan",
    "PlanError",
    "Recipe",
    "Report",
    "audit",
    "defer",
    "deferred_init",
    "is_deferred",
    "materialize",
    "materialize_module",
    "materialize_on_first_forward",
    "materialize_tensor",
    "on_meta",
    "param_init_fn",
    "plan",
    "register_initializer",
]

# Imports torch, notes the state of the process, imports the module named on the
# command line, and prints every effect that an import should not have.
_PROBE = """
import os, sys
sys.path[:0] = sys.argv[2:]
import torch

def looks():
    return {
        (holder.__name__, name): id(value)
        for holder in (torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter,
                       torch.nn.init, torch.utils)
        for name, value in vars(holder).items()
    }

read = []
get = os._Environ.__getitem__
os._Environ.__getitem__ = lambda self, key: read.append(key) or get(self, key)
modules, before = set(sys.modules), looks()
rng = torch.get_rng_state()
__import__(sys.argv[1])
own = {sys.argv[1], "torch"}
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
for name in sorted(new - own - set(sys.stdlib_module_names)):
    print("imported", name)
after = looks()
for key in sorted(before):
    if after.get(key) != before[key]:
        print("patched", *key)
for key in read:
    print("read", key)
if torch.cuda.is_initialized():
    print("initialized CUDA")
if not torch.equal(rng, torch.get_rng_state()):
    print("drew random numbers")
"""


def _effects(module: str, folder: Path) -> list[str]:
    """Import a module in a process of its own and list the effects."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, module, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_importing_the_package_imports_torch_and_nothing_else() -> None:
    assert _effects("deferred_init", ROOT) == []


def test_the_probe_of_the_test_above_notices_every_effect(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").touch()
    (tmp_path / "careless.py").write_text(
        "import os, torch, stranger\n"
        "os.environ.get('HOME')\n"
        "torch.nn.Module.to = lambda self: self\n"
        "torch.rand(1)\n"
    )
    assert _effects("careless", tmp_path) == [
        "imported stranger",
        "patched Module to",
        "read HOME",
        "drew random numbers",
    ]


_MATERIALIZE = """
import sys
import numpy, torch
import deferred_init as di

before = "numpy.random" in sys.modules
layer = torch.nn.Linear(2, 2, device="meta")
di.materialize(layer, "cpu", seed=0)
print(before, "numpy.random" in sys.modules)
"""


def test_materializing_does_not_load_the_random_numbers_of_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MATERIALIZE],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    before, after = done.stdout.split()
    assert before == after  # numpy 1 loads them by itself


def test_the_public_names_are_these_and_stand_in_all() -> None:
    assert sorted(deferred_init.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_exists_and_says_what_it_is(name: str) -> None:
    assert getattr(deferred_init, name).__doc__


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _runtime_imports(node: ast.AST, *, lazy: bool) -> Iterator[ast.stmt]:
    """Yield import statements but those for the type checker alone.

    Args:
        node: Where to look.
        lazy: Whether to look into functions as well.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _runtime_imports(other, lazy=lazy)
        elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _runtime_imports(child, lazy=lazy)


def _imported(name: str, path: Path, modules: set[str], *, lazy: bool) -> set[str]:
    """Name the package's modules that one of them imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for statement in _runtime_imports(ast.parse(path.read_text()), lazy=lazy):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names} & modules
            continue
        assert isinstance(statement, ast.ImportFrom)
        source = statement.module or ""
        if statement.level:
            above = package.split(".")[: len(package.split(".")) - statement.level + 1]
            source = ".".join([*above, source] if source else above)
        for alias in statement.names:
            full = f"{source}.{alias.name}"
            if full in modules:
                found.add(full)
            elif source in modules:
                found.add(source)
    return found - {name}


def _graph(*, lazy: bool) -> dict[str, set[str]]:
    modules = _modules()
    return {
        name: _imported(name, path, set(modules), lazy=lazy)
        for name, path in modules.items()
    }


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle, or nothing if imports only point down."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            found = visit(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in graph:
        found = visit(name, [])
        if found:
            return found
    return []


def test_imports_point_down_so_that_no_modules_import_each_other() -> None:
    assert _cycle(_graph(lazy=True)) == []


def test_the_search_for_cycles_finds_one() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def _is_handler(name: str) -> bool:
    # The last is the larger half of the handler of recorded models.
    others = ("handlers.protocol", "handlers.registry", "handlers.replays")
    return name.startswith("deferred_init.handlers.") and not name.endswith(others)


def test_handlers_never_import_handlers() -> None:
    offenders = {
        f"{name} imports {other}"
        for name, imported in _graph(lazy=True).items()
        if _is_handler(name)
        for other in imported
        if _is_handler(other)
    }
    assert offenders == set()


def _private_imports(tree: ast.AST) -> set[str]:
    """Name what a module imports from others of the package and is theirs alone."""
    return {
        f"{statement.module}.{alias.name}"
        for statement in _runtime_imports(tree, lazy=True)
        if isinstance(statement, ast.ImportFrom)
        and (statement.module or "").partition(".")[0] == "deferred_init"
        for alias in statement.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    }


def test_no_module_imports_private_names_of_another() -> None:
    found = {
        f"{name} imports {private}"
        for name, path in _modules().items()
        for private in _private_imports(ast.parse(path.read_text()))
    }
    assert found == set()


def test_the_search_for_private_names_finds_one() -> None:
    code = (
        "from deferred_init.slots import Slot, _hidden\n"
        "from deferred_init import __version__\n"
        "def late():\n    from deferred_init.rng import _secret\n"
    )
    expected = {"deferred_init.slots._hidden", "deferred_init.rng._secret"}
    assert _private_imports(ast.parse(code)) == expected


def test_the_errors_stand_at_the_bottom() -> None:
    assert _graph(lazy=True)["deferred_init.errors"] == set()

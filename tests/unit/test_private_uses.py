"""The code uses no private name of another package that is not on the list.

The reader knows four ways to use one: an import, a dotted path from something imported,
an attribute of anything, and a name in a string (`getattr`, `vars(module)[...]`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deferred_init
from deferred_init.private_names import PRIVATE_NAMES

PACKAGE = Path(deferred_init.__file__).parent
PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")

# Strings that look like private names of others and are none.
NO_NAMES = {
    "_extra_state": "the end of keys in state dicts; documented",
    "_g": "the end of the public parameter names of `weight_norm`",
    "_v": "the end of the public names of `weight_norm` and `spectral_norm`",
    "_u": "the end of the public buffer names of `spectral_norm`",
    "_orig": "the end of the public parameter names of `spectral_norm`",
    "_fsdp": "how attributes of parameters begin that `fully_shard` sets",
    "_like": "the end of names of operations",
    "_value": "an attribute of ours, in a recorded tensor's `__dict__`",
    "_deferred_init_bare": "an attribute of ours, on a function",
    "_thread": "a module of the standard library",
}
# Prefixes of modules whose objects the audit does not look into; they need not exist.
NO_USES = {
    *("torch._dynamo", "torch._inductor", "torch._subclasses"),
    *("torch._functorch", "torch._guards"),
}
# Attributes that torch gives its objects, also where a class of ours has one like it.
OF_TORCH = {name for name in vars(torch.nn.Module()) if PRIVATE.fullmatch(name)}


def _trees(folder: Path) -> dict[str, ast.Module]:
    return {
        path.relative_to(folder).as_posix(): ast.parse(path.read_text())
        for path in sorted(folder.rglob("*.py"))
        if path.parent.name != "private_names"
    }


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "deferred_init"}


def _has_private_part(path: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in path.split("."))


def _imports(tree: ast.Module) -> dict[str, str]:
    """Map local names to what is imported from other packages."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                found[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: path for name, path in found.items() if _is_foreign(path)}


def _chain(node: ast.Attribute) -> tuple[ast.expr, list[ast.Attribute]]:
    """Split `a.b.c` into `a` and its attributes, outermost last."""
    parts = [node]
    while isinstance(parts[-1].value, ast.Attribute):
        parts.append(parts[-1].value)
    return parts[-1].value, parts[::-1]


def _uses(tree: ast.Module, own: set[str]) -> set[str]:
    """Return dotted paths, and single names where the owner is not known."""
    imports = _imports(tree)
    found = {path for path in imports.values() if _has_private_part(path)}
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in seen:
            root, parts = _chain(node)
            seen |= {id(part) for part in parts}
            names = [part.attr for part in parts]
            if isinstance(root, ast.Name) and root.id in imports:
                path = ".".join([imports[root.id], *names])
                found |= {path} if _has_private_part(path) else set()
            else:
                found |= {name for name in names if _is_private(name, own)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            dotted = DOTTED.fullmatch(text) and _has_private_part(text)
            if _is_private(text, own) or (dotted and _is_foreign(text)):
                found.add(text)
    return found - NO_NAMES.keys() - NO_USES


def _is_private(name: str, own: set[str]) -> bool:
    return bool(PRIVATE.fullmatch(name)) and (name in OF_TORCH or name not in own)


def _all_uses(folder: Path) -> dict[str, set[str]]:
    trees = _trees(folder)
    own = {name for tree in trees.values() for name in _own_names(tree)}
    return {path: _uses(tree, own) for path, tree in trees.items()}


def _is_listed(used: str) -> bool:
    """Whether an entry is that path, or a part of it, or begins it."""
    return any(
        f".{used}." in f".{name.path}." or used.startswith(f"{name.path}.")
        for name in PRIVATE_NAMES
    )


def test_every_private_name_of_another_package_is_listed() -> None:
    unlisted = {
        f"{path}: {used}"
        for path, uses in _all_uses(PACKAGE).items()
        for used in uses
        if not _is_listed(used)
    }
    assert unlisted == set(), "add them to deferred_init/private_names"


def test_every_exception_is_still_needed() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for name in (*NO_NAMES, *NO_USES) if f'"{name}"' not in text] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch._private import thing", {"torch._private.thing"}),
        ("from torch.nn import _private as x", {"torch.nn._private"}),
        ("import torch._private", set()),
        ("import torch._private as x", {"torch._private"}),
        ("import torch\ntorch._C._private(3)", {"torch._C._private"}),
        ("from torch import nn as n\nn.Module._private", {"torch.nn.Module._private"}),
        ("def f(x):\n    return x._private.y", {"_private"}),
        ("def f(x):\n    x._buffers['a'] = 1\n    self._buffers = {}", {"_buffers"}),
        ("getattr(x, '_private', None)", {"_private"}),
        ("sys.modules.get('torch._private.part')", {"torch._private.part"}),
        (
            "class A:\n    def f(self):\n        self._mine = 1\n        self._mine",
            set(),
        ),
        ("from deferred_init import _mine\nfrom os import _exit", set()),
        ("x.__dict__, x.public, '__slots__'", set()),
    ],
)
def test_the_reader_sees_each_way_to_use_a_private_name(
    tmp_path: Path, code: str, expected: set[str]
) -> None:
    (tmp_path / "code.py").write_text(code)
    assert _all_uses(tmp_path)["code.py"] == expected


def test_a_name_that_is_on_no_list_is_not_listed() -> None:
    assert _is_listed("torch._C._swap_tensor_impl")
    assert _is_listed("_use_count")
    assert not _is_listed("torch._C._swap_tensor")
    assert not _is_listed("_use_counts")

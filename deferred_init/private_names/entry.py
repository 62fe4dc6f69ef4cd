"""What is known of one private name, and how to look for it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import types
from dataclasses import dataclass

__all__ = ["PrivateName", "entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One name that its package does not promise to keep.

    Attributes:
        module: Where it is imported from; its first part is the package.
        name: Dotted path in that module; it may end in an attribute that only
            instances have.
        purpose: What it is for here.
        fallback: What happens, or is to be done, without it.
        only_in: Releases that have it, when it is not all that are supported; the
            code asks before it uses such a name.
    """

    module: str
    name: str
    purpose: str
    fallback: str
    only_in: str = ""

    @property
    def path(self) -> str:
        """Module and name, joined."""
        return f"{self.module}.{self.name}"

    def exists(self) -> bool:
        """Whether the installed release has it; imports its module."""
        try:
            found: object = importlib.import_module(self.module)
        except ImportError:
            return False
        *path, last = self.name.split(".")
        try:
            owner = functools.reduce(getattr, path, found)
        except AttributeError:
            return False
        return hasattr(owner, last) or _is_written(owner, last)


def _is_written(owner: object, name: str) -> bool:
    """Whether the source of a class or module, or of a base, stores an attribute."""
    if not isinstance(owner, (type, types.ModuleType)):
        return False
    places = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(name in _stored_names(place) for place in places if place is not object)


@functools.cache
def _stored_names(owner: type | types.ModuleType) -> frozenset[str]:
    """Attributes that the file of an object stores, and words in its strings."""
    try:
        module = inspect.getmodule(owner)
        tree = ast.parse(inspect.getsource(module)) if module else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def entries(
    module: str, *rows: tuple[str, str, str] | tuple[str, str, str, str]
) -> tuple[PrivateName, ...]:
    """Make the entries of one module.

    Args:
        module: Where the names are imported from.
        rows: Name, purpose, fallback, and, if it is not all, the releases that have it.
    """
    return tuple(
        PrivateName(
            module=module,
            name=row[0],
            purpose=row[1],
            fallback=row[2],
            only_in=row[3] if len(row) == 4 else "",
        )
        for row in rows
    )

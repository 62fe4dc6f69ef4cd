r"""Rules for layouts that differ between a checkpoint and a model.

They speak of names after renaming. Patterns are regular expressions that match a
whole name; in templates `\1` and `\g<name>` stand for groups of the pattern, and
`{index}` for a number counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deferred_init.sources.pieces import Piece, Sizes
from deferred_init.sources.protocol import TensorInfo

__all__ = ["Assembly", "LayoutRule", "Stored", "check_rule", "matches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the checkpoint, listed under its name after renaming.

    Attributes:
        key: Its key in the source.
        info: Its shape and dtype.
    """

    key: str
    info: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """How a tensor of the model is put together, or why it cannot be.

    Attributes:
        pieces: The parts; they cover the tensor.
        problem: What does not fit; then there are no pieces.
    """

    pieces: tuple[Piece, ...] = ()
    problem: str | None = None


@runtime_checkable
class LayoutRule(Protocol):
    """A rule that makes tensors of the model from other than one stored tensor."""

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Return what it makes, by the model's names.

        Args:
            stored: What the checkpoint has, by name after renaming.
            shapes: What the model has.
        """
        ...


def matches(
    pattern: str, names: Mapping[str, object]
) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the names that a pattern matches as a whole."""
    compiled = re.compile(pattern)
    for name in names:
        match = compiled.fullmatch(name)
        if match is not None:
            yield name, match


def check_rule(pattern: str, dim: int, groups: int = 1) -> None:
    """Check the arguments of a rule.

    Raises:
        ValueError: The pattern is no regular expression, or a number is impossible.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if dim < 0:
        raise ValueError(f"`dim` must be counted from the front, found {dim}")
    if groups < 1:
        raise ValueError(f"`groups` must be 1 or more, found {groups}")

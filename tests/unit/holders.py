"""Objects that hold something, for the walks that look for tensors in them."""

from __future__ import annotations

from typing import Any


class Plain:
    """Holds it in an attribute."""

    def __init__(self, held: object) -> None:
        self.held = held

    def method(self) -> None:
        """Be bound."""


class Text(str):
    """A subclass of an atom, which has attributes."""


def with_attribute(made: Any, held: object) -> Any:
    """Put it into an attribute of something that exists."""
    made.held = held
    return made

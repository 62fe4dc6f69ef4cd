"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from typing import Final

__all__ = ["TARGET", "positive"]

TARGET: Final = (
    "package.module:function, called without arguments; or a Hugging Face folder or "
    "config.json, of which the configuration is read and nothing else"
)


def positive(text: str) -> int:
    """Read an integer of at least 1.

    Raises:
        ArgumentTypeError: It is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value

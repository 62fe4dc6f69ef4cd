"""`deferred-init doctor`: what is installed, and what is wrong with it."""

from __future__ import annotations

import argparse
from typing import Any, Final

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = (
    "say what is installed, which GPU there is, and what is wrong with either"
)
EXAMPLE: Final = "deferred-init doctor"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command looks at the whole machine."""


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Diagnose."""
    from deferred_init.doctor import diagnose, diagnosis_text

    diagnosis = diagnose()
    return bool(diagnosis["ok"]), diagnosis, diagnosis_text(diagnosis)

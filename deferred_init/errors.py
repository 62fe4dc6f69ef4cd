"""The errors of the package, one class per stage, and the wording they share."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AuditError",
    "DeferredInitError",
    "MaterializeError",
    "PlanError",
    "listing",
]

_MAX_NAMES = 10


class DeferredInitError(Exception):
    """Root of every error that this package raises on purpose."""


class PlanError(DeferredInitError):
    """The request cannot be carried out; found before anything was changed.

    Attributes:
        problems: Every offender found, one sentence each, in the order found.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class MaterializeError(DeferredInitError):
    """A step failed after work had begun; everything was put back as it was."""


class AuditError(DeferredInitError):
    """The audit found something wrong; the report is attached.

    Attributes:
        report: The full `Report`, with the findings that caused this error.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


def listing(names: Sequence[str], *, limit: int = _MAX_NAMES) -> str:
    """Join names for an error message, at most `limit` of them in full.

    >>> listing(["a", "b"])
    '`a`, `b`'
    >>> listing(["a", "b", "c"], limit=2)
    '`a`, `b`, ... and 1 more'
    """
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    hidden = len(names) - limit
    return f"{shown}, ... and {hidden} more" if hidden > 0 else shown

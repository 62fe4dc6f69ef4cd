"""The report as one HTML page that needs no network."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deferred_init.report import Report

__all__ = ["report_html"]


def report_html(report: Report) -> str:
    """Return the page; style, script and data stand in it."""
    verdict = "ready" if report.ok else "not ready"
    filled = {
        "TITLE": html.escape(f"deferred-init: {verdict}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "DATA": _embedded(report.to_json(indent=None)),
    }
    head, *rest = _asset("page.html").split("__")
    # Names stand at every second place; what is filled in is never looked at again.
    return head + "".join(filled.get(part, part) for part in rest)


def _embedded(text: str) -> str:
    """Make JSON safe inside a script element: no tag can begin in it."""
    assert json.loads(text) is not None
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _asset(name: str) -> str:
    page = resources.files("deferred_init") / "report_page" / name
    return page.read_text(encoding="utf-8")

"""Write `docs/findings.md` from the audit's own explanations.

python tests/docs/findings_page.py
"""

from __future__ import annotations

from pathlib import Path

from deferred_init.audit.explanations import EXPLANATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "findings.md"

_HEAD = """\
# Findings

What each code of a finding means. The audit's message names the place, and says what
was expected and found; here are the usual cause and the cure. The same texts are in
`deferred_init.audit.EXPLANATIONS`.
"""


def page_text() -> str:
    """Return the page, one section per code."""
    sections = [
        f"## {code}\n\n**Cause.** {cause}\n\n**Cure.** {cure}\n"
        for code, (cause, cure) in EXPLANATIONS.items()
    ]
    return "\n".join([_HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")

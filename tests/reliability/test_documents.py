"""The documents about reliability name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(
    r"`(tests/[\w/]+\.py)(?:::(\w+))?`(?: \(row (\d+)\))?",
    "".join(
        (ROOT / path).read_text()
        for path in ("docs/reports.md", "docs/reliability.md", "SECURITY.md")
    ),
)


def test_the_documents_name_tests() -> None:
    assert len(NAMED) > 100


@pytest.mark.parametrize(("path", "test", "row"), sorted(set(NAMED)))
def test_a_test_that_a_document_names_exists(path: str, test: str, row: str) -> None:
    source = (ROOT / path).read_text()
    if test:
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{path}::{test}"
    if row:
        assert re.search(rf"^@row\({row}, ", source, re.MULTILINE), f"{path} row {row}"

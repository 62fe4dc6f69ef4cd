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
        for path in (
            *("docs/reports.md", "docs/reliability.md", "docs/te_traps.md"),
            "SECURITY.md",
        )
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


TRAPS = [
    line
    for line in (ROOT / "docs/te_traps.md").read_text().splitlines()
    if line.startswith("|") and not re.match(r"\|(---|.* \| here \| test \|)", line)
]


def test_traps_are_many() -> None:
    assert len(TRAPS) > 60


@pytest.mark.parametrize("row", TRAPS)
def test_a_trap_has_a_test_or_a_reason_for_none(row: str) -> None:
    _, trap, here, tests, _ = row.split("|")
    assert trap.strip()
    assert here.strip()
    assert "`tests/" in tests or tests.strip().startswith("not tested: "), trap

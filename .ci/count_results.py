"""Add up pytest's JUnit files and print `N passed, N failed, N skipped`.

Usage: count_results.py FOLDER [FAILED_STEP ...]. A failed step without a file of its
own (a linter, an import, a pytest that crashed) counts as one failure. The exit code is
1 if anything failed, or if no test ran at all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def count(folder: Path, failed_steps: list[str]) -> tuple[int, int, int]:
    """Return the numbers of passed, failed and skipped tests and steps."""
    passed = failed = skipped = 0
    for path in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            tests, errors, failures, skips = (
                int(suite.get(key, 0))
                for key in ("tests", "errors", "failures", "skipped")
            )
            passed += tests - errors - failures - skips
            failed += errors + failures
            skipped += skips
            print(f"{path.stem}: {tests} tests, {errors + failures} failed")
    for step in failed_steps:
        print(f"failed step: {step}")
        path = folder / f"{step}.xml"
        if not path.exists() or not _has_failure(path):
            failed += 1
    return passed, failed, skipped


def _has_failure(path: Path) -> bool:
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    return any(int(s.get("errors", 0)) + int(s.get("failures", 0)) for s in suites)


if __name__ == "__main__":
    passed, failed, skipped = count(Path(sys.argv[1]), sys.argv[2:])
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or not passed else 0)

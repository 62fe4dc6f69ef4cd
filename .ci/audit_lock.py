"""Ask pip-audit for known vulnerabilities of what the lock of CI names.

Usage: audit_lock.py PIP_AUDIT_PROGRAM. Fails on a vulnerability. Where the data base
cannot be reached, it says so and does not fail: a check that did not run is no finding.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent / "constraints.txt"


def verdict(dependencies: list[dict[str, Any]]) -> tuple[str, int]:
    """Word what pip-audit found, and return the exit code."""
    asked = [each for each in dependencies if "skip_reason" not in each]
    unasked = [each["name"] for each in dependencies if "skip_reason" in each]
    found = [
        f"{each['name']} {each['version']}: {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability['fix_versions']) or 'no release yet'}"
        for each in asked
        for vulnerability in each["vulns"]
    ]
    lines = [f"{len(asked)} packages looked up, {len(found)} known vulnerabilities"]
    if unasked:
        reason = "the data base could not be reached or does not know them"
        shown = ", ".join(unasked[:5])
        lines.append(f"!!! SKIPPED {len(unasked)} packages ({shown}, ...): {reason}")
    return "\n".join([*lines, *found]), int(bool(found))


def main() -> int:
    """Run pip-audit on the lock."""
    command = [sys.argv[1], "--no-deps", "--disable-pip", "--timeout", "10"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", "--requirement", str(LOCK)],
            capture_output=True,
            text=True,
            timeout=180,
        )
        dependencies = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print("!!! SKIPPED: pip-audit had no answer within 180 s")
        return 0
    except (ValueError, KeyError):
        print(f"!!! SKIPPED: pip-audit could not run: {done.stderr.strip()[-300:]}")
        return 0
    said, code = verdict(dependencies)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main())

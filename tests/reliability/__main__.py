"""The long run: `python -m tests.reliability [EXAMPLES]`; says at the end what it did.

Every law is tried with so many random module trees (1,000 by default), every kind of
error is raised at every boundary, and all seeded faults of the audit are tried.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
FILES = (
    TESTS / "reliability",
    TESTS / "behaviour" / "test_all_or_nothing.py",
    TESTS / "behaviour" / "test_audit_mutations.py",
    TESTS / "distributed" / "test_faults.py",
    TESTS / "distributed" / "test_broadcast_faults.py",
    TESTS / "distributed" / "test_killed_ranks.py",
    TESTS / "te" / "test_te_faults.py",
    TESTS / "gpu" / "test_faults.py",
    TESTS / "gpu" / "test_surroundings.py",
)


def main(arguments: list[str]) -> int:
    os.environ["RELIABILITY_EXAMPLES"] = arguments[0] if arguments else "1000"
    start = time.monotonic()
    status = pytest.main(["-q", "--tb=short", *map(str, FILES)])
    from tests.reliability.tally import tally

    hours = (time.monotonic() - start) / 3600
    counts = ", ".join(f"{number:,} {what}" for what, number in sorted(tally.items()))
    sys.stdout.write(
        f"{counts} in {hours:.2f} hours; {time.strftime('%Y-%m-%d')}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} CPU cores\n"
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

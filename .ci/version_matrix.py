"""Run the core tests on several sets of releases, and print a table.

Each row has a virtual environment of its own, made in a temporary folder and removed
before the next one is made. The row with an old Transformer Engine builds it and runs
`tests/te`. A row that cannot be installed here is SKIPPED, with the reason. The last
lines are `N rows passed, N failed, N skipped` and, of the tests in them, `N passed, N
failed, N skipped`; the exit code is 1 if a row failed, or if none ran.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import te_extension
from count_results import count

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    "tests/unit",
    "tests/behaviour",
    "tests/record",
    "tests/weights",
    "tests/reliability/test_private_names.py",
)
SHOWN = ("torch", "transformers", "accelerate", "safetensors", "transformer-engine")
EXTRAS = ("hf", "report", "test")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is installed.

    Attributes:
        python: `major.minor`.
        torch: A version, or "" for the newest.
        oldest: Whether every other package is the oldest that pyproject.toml names.
        te: A release of Transformer Engine, which is built, or "" for none.
        tests: What is run.
    """

    name: str
    python: str
    torch: str
    oldest: bool = False
    te: str = ""
    tests: tuple[str, ...] = CORE


ROWS = (
    Row(name="oldest", python="3.10", torch="2.11.0", oldest=True),
    Row(name="torch-2.11", python="3.11", torch="2.11.0"),
    Row(name="torch-2.13", python="3.11", torch="2.13.0"),
    Row(name="torch-2.14", python="3.12", torch="2.14.1"),
    Row(name="newest", python="3.13", torch=""),
    Row(
        name="te-oldest",
        python="3.11",
        torch="2.11.0",
        te="2.9.0",
        tests=("tests/te",),
    ),
)


@dataclass(kw_only=True)
class Outcome:
    """One line of the table."""

    name: str
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reason: str = ""

    def line(self) -> str:
        """Return the table's line."""
        versions = [self.versions.get(name, "-") for name in SHOWN]
        counts = [str(n) for n in (self.passed, self.failed, self.skipped)]
        said = self.reason or f"{self.seconds:.0f} s"
        return (
            "| " + " | ".join([self.name, self.python, *versions, *counts, said]) + " |"
        )


def requirements(pyproject: str, *, oldest: bool) -> list[str]:
    """Return what the tests need, from the text of pyproject.toml.

    Args:
        pyproject: Its text.
        oldest: Turn every `>=` into `==`; torch is left out either way.
    """
    found = []
    for extra in ("dependencies", *EXTRAS):
        listed = re.search(rf"^{extra} = \[(.*?)\]\n", pyproject, re.M | re.S)
        if listed is None:
            raise SystemExit(f"pyproject.toml has no list {extra!r}")
        found += re.findall(r'"([^"]+)"', listed[1])
    others = [each for each in found if not each.startswith(("torch", "deferred-init"))]
    return [each.replace(">=", "==") for each in others] if oldest else others


def interpreter(version: str) -> str | None:
    """Find a Python of a version that starts."""
    pyenv = Path("~/.pyenv/versions").expanduser()
    candidates = [f"python{version}", *map(str, pyenv.glob(f"{version}*/bin/python"))]
    for candidate in candidates:
        if (
            shutil.which(candidate)
            and not subprocess.run(
                [candidate, "-c", "import venv, ensurepip"], capture_output=True
            ).returncode
        ):
            return candidate
    return None


def install(row: Row, folder: Path) -> str:
    """Make the row's environment; return why it could not be made, or nothing."""
    found = interpreter(row.python)
    if found is None:
        return f"there is no Python {row.python}"
    subprocess.run([found, "-m", "venv", folder], check=True)
    wanted = [f"torch=={row.torch}" if row.torch else "torch"]
    wanted += requirements((ROOT / "pyproject.toml").read_text(), oldest=row.oldest)
    pip = [folder / "bin/python", "-m", "pip", "install", "--no-cache-dir", "--quiet"]
    # No constraints: neither the lock of CI nor what a machine prefers.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(
        [*pip, *wanted], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        return f"cannot be installed: {' '.join(errors[-1:]) or done.stderr[-200:]}"
    if row.te:
        try:
            te_extension.install(folder / "bin/python", row.te)
        except te_extension.CannotBuildError as error:
            return f"Transformer Engine {row.te} cannot be built: {error}"
    return ""


def run_tests(name: str, python: Path, folders: list[str], log: Path) -> Outcome:
    """Run the tests in an environment that is there."""
    describe = (
        "import platform, sysconfig; from importlib import metadata\n"
        "print('python', platform.python_version())\n"
        "print('site', sysconfig.get_path('purelib'))\n"
        f"for name in {SHOWN!r}:\n"
        "    try: print(name, metadata.version(name))\n"
        "    except metadata.PackageNotFoundError: pass\n"
    )
    told = subprocess.check_output([python, "-c", describe], text=True)
    versions = dict(line.split(maxsplit=1) for line in told.splitlines())
    site = Path(versions.pop("site"))
    results = log.with_suffix("")
    results.mkdir()
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if "transformer-engine" in versions:
        environment |= te_extension.variables(site)
        environment["DEFERRED_INIT_REQUIRE_TE"] = "1"
    with log.open("w") as file:
        status = subprocess.run(
            [
                *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *(f"--junitxml={results / 'core.xml'}", *folders),
            ],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        ).returncode
    passed, failed, skipped = count(results, ["core"] if status else [])
    return Outcome(
        name=name,
        python=versions.pop("python"),
        versions=versions,
        passed=passed,
        failed=failed,
        skipped=skipped,
        seconds=time.monotonic() - started,
        reason=f"FAILED, see {log}" if failed else "",
    )


def main() -> int:
    """Run the rows that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {names}")
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="FOLDER",
        help="a virtual environment that is there already; installs nothing",
    )
    parser.add_argument("--tests", nargs="+", help="instead of the row's, or core")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.rows} - {*names})
    if unknown:
        parser.error(f"no row is called {unknown}; there are {names}")
    chosen = [row for row in ROWS if row.name in (arguments.rows or names)]
    if arguments.environment and len(arguments.rows) > 1:
        parser.error("an environment that is there can stand for one row only")
    work = Path(tempfile.mkdtemp(prefix="versions-"))
    print(f"logs are in {work}")
    outcomes = []
    if arguments.environment:
        python = arguments.environment / "bin/python"
        name = arguments.environment.name
        tests = chosen[0].tests if arguments.rows else CORE
        folders = arguments.tests or list(tests)
        outcomes.append(run_tests(name, python, folders, work / f"{name}.log"))
    else:
        for row in chosen:
            outcomes.append(one_row(row, work, arguments.tests or list(row.tests)))
            print(outcomes[-1].line(), flush=True)
    return summed_up(outcomes)


def one_row(row: Row, work: Path, folders: list[str]) -> Outcome:
    """Install a row, run the tests, and remove what was installed."""
    folder = work / f"{row.name}-environment"
    try:
        reason = install(row, folder)
        if reason:
            return Outcome(
                name=row.name, python=row.python, reason=f"SKIPPED: {reason}"
            )
        log = work / f"{row.name}.log"
        return run_tests(row.name, folder / "bin/python", folders, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summed_up(outcomes: list[Outcome]) -> int:
    """Print the table and the last line; return the exit code."""
    print(
        "\n| row | Python | "
        + " | ".join(SHOWN)
        + " | passed | failed | skipped | time |"
    )
    print("|---" * (len(SHOWN) + 6) + "|")
    for outcome in outcomes:
        print(outcome.line())
    num_skipped = sum(each.reason.startswith("SKIPPED") for each in outcomes)
    num_failed = sum(bool(each.failed) for each in outcomes)
    num_passed = len(outcomes) - num_skipped - num_failed
    for outcome in outcomes:
        if outcome.reason:
            print(f"!!! {outcome.name}: {outcome.reason}")
    print(f"{num_passed} rows passed, {num_failed} failed, {num_skipped} skipped")
    passed, failed, skipped = (
        sum(getattr(each, key) for each in outcomes)
        for key in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if num_failed or not num_passed else 0


if __name__ == "__main__":
    sys.exit(main())

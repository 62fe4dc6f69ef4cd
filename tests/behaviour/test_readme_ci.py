"""The script that sums up CI: no failure is lost on the way to the last line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _junit(folder: Path, name: str, **counts: int) -> None:
    attributes = {"tests": 0, "errors": 0, "failures": 0, "skipped": 0, **counts}
    text = " ".join(f'{key}="{value}"' for key, value in attributes.items())
    (folder / f"{name}.xml").write_text(
        f"<testsuites><testsuite {text}></testsuite></testsuites>"
    )


def _sum_up(folder: Path, *failed_steps: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "count_results.py", folder, *failed_steps],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()[-1], done.returncode


def test_the_results_of_all_runs_are_added_up(tmp_path: Path) -> None:
    _junit(tmp_path, "one", tests=10, skipped=2)
    _junit(tmp_path, "two", tests=5)
    assert _sum_up(tmp_path) == ("13 passed, 0 failed, 2 skipped", 0)


def test_failures_and_errors_fail_the_whole(tmp_path: Path) -> None:
    _junit(tmp_path, "one", tests=10, failures=1, errors=2)
    assert _sum_up(tmp_path, "one") == ("7 passed, 3 failed, 0 skipped", 1)


def test_a_failed_step_without_tests_counts_as_a_failure(tmp_path: Path) -> None:
    _junit(tmp_path, "one", tests=10)
    assert _sum_up(tmp_path, "lint") == ("10 passed, 1 failed, 0 skipped", 1)


def test_a_run_that_failed_although_its_tests_passed_counts_as_a_failure(
    tmp_path: Path,
) -> None:
    _junit(tmp_path, "one", tests=10)
    assert _sum_up(tmp_path, "one") == ("10 passed, 1 failed, 0 skipped", 1)


def test_no_test_at_all_is_a_failure(tmp_path: Path) -> None:
    assert _sum_up(tmp_path) == ("0 passed, 0 failed, 0 skipped", 1)


@pytest.mark.parametrize("name", ["run", "count_results.py", "readme_commands.py"])
def test_the_scripts_of_ci_are_there(name: str) -> None:
    assert (ROOT / ".ci" / name).is_file()


def test_what_pytest_writes_is_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('because')\n"
        "def test_error(missing_fixture): pass\n"
    )
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'it.xml'}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", "."],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert _sum_up(tmp_path) == ("1 passed, 2 failed, 1 skipped", 1)

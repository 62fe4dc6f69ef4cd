"""The lock of CI, the check of what it names, and the matrix of versions."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / ".ci" / "constraints.txt").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
EXTRAS = PYPROJECT.partition("[dependency-groups]")[0]


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _locked() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_lock_pins_each_package_once_and_leaves_torch_alone() -> None:
    locked = _locked()
    assert len(locked) == sum(not line.startswith("#") for line in LOCK.splitlines())
    assert all(re.fullmatch(r"[\w.]+", version) for version in locked.values())
    with_cuda = re.compile(r"torch$|triton|nvidia-|cuda-|transformer-engine")
    assert [name for name in locked if with_cuda.match(name)] == []


def test_the_lock_names_all_that_the_developers_need() -> None:
    from packaging.requirements import Requirement

    wanted = [
        Requirement(text)
        for extra in ("hf", "lightning", "report", "test", "docs", "dev")
        for listed in re.findall(rf"^{extra} = \[(.*?)\]\n", EXTRAS, re.M | re.S)
        for text in re.findall(r'"([a-z][^"]*)"', listed)
    ]
    locked = _locked()
    assert len(wanted) > 10
    for requirement in wanted:
        if requirement.name != "deferred-init":
            assert requirement.specifier.contains(locked[requirement.name]), requirement


def test_a_known_vulnerability_fails_and_a_missing_data_base_only_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = _script("audit_lock", monkeypatch).verdict
    good = {"name": "a", "version": "1", "vulns": []}
    bad = {**good, "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
    unknown = {"name": "b", "skip_reason": "not found"}
    assert verdict([good]) == ("1 packages looked up, 0 known vulnerabilities", 0)
    assert verdict([good, unknown]) == (
        "1 packages looked up, 0 known vulnerabilities\n!!! SKIPPED 1 packages (b, "
        "...): the data base could not be reached or does not know them",
        0,
    )
    said, code = verdict([bad])
    assert code == 1
    assert said.endswith("a 1: PYSEC-1, mended in 2")


def test_the_oldest_row_is_what_pyproject_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = _script("version_matrix", monkeypatch)
    oldest = matrix.requirements(PYPROJECT, oldest=True)
    newest = matrix.requirements(PYPROJECT, oldest=False)
    assert re.search(r'"transformers>=([\d.]+)"', PYPROJECT)[1] in "".join(oldest)
    assert [each.replace(">=", "==") for each in newest] == oldest
    assert not any(each.startswith("torch") for each in oldest)
    assert [row.torch for row in matrix.ROWS if row.oldest] == [
        re.search(r'"torch>=([\d.]+)"', PYPROJECT)[1] + ".0"
    ]


def test_a_row_that_cannot_be_installed_is_skipped_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    matrix = _script("version_matrix", monkeypatch)
    row = matrix.Row(name="future", python="9.9", torch="99.0")
    outcome = matrix.one_row(row, tmp_path, [])
    fine = matrix.Outcome(name="fine", passed=3)
    assert matrix.summed_up([fine, outcome]) == 0
    *_, told, rows, last = capsys.readouterr().out.splitlines()
    assert told == "!!! future: SKIPPED: there is no Python 9.9"
    assert rows == "1 rows passed, 0 failed, 1 skipped"
    assert last == "3 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("failed", [0, 2])
def test_a_row_with_a_failure_fails_and_so_does_no_row_at_all(
    failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = _script("version_matrix", monkeypatch)
    rows = [matrix.Outcome(name="x", failed=failed)] if failed else []
    assert matrix.summed_up(rows) == 1


def test_the_tests_run_in_an_environment_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matrix = _script("version_matrix", monkeypatch)
    (tmp_path / "test_x.py").write_text("def test_a(): pass\ndef test_b(): assert 0")
    outcome = matrix.run_tests(
        "here", Path(sys.executable), [str(tmp_path)], tmp_path / "here.log"
    )
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 1, 0)
    assert outcome.reason.startswith("FAILED, see ")
    assert outcome.python == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in outcome.versions


def _te_sources(folder: Path, attribute: str) -> Path:
    ops = folder / "transformer_engine" / "pytorch" / "ops"
    ops.mkdir(parents=True)
    (ops / "op.py").write_text(
        f"class BasicOperation:\n  def __init__(self):\n    self.{attribute} = 1\n"
    )
    return folder


def test_a_private_name_that_a_release_of_te_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = _script("te_releases", monkeypatch)
    names = [n for n in script.te_names() if n.name == "BasicOperation._quantizers"]
    assert len(names) == 1
    good = _te_sources(tmp_path / "good", "_quantizers")
    bad = _te_sources(tmp_path / "bad", "quantizers")
    said = "1 of 1 names, 0 may be absent, 0 are missing"
    assert script.checked(good, names) == (said, [])
    said = "0 of 1 names, 0 may be absent, 1 are missing"
    assert script.checked(bad, names) == (said, [names[0].path])
    assert script.checked(tmp_path, names) == (said, [names[0].path])
    monkeypatch.setattr(script, "unpacked", lambda version, folder: bad)
    monkeypatch.setattr(script, "te_names", lambda: names)
    monkeypatch.setattr(sys, "argv", ["te_releases.py", "0.1"])
    assert script.main() == 1


def test_the_oldest_release_of_te_that_we_name_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oldest = re.search(r"transformer-engine\[[^]]*\]>=([\d.]+)", PYPROJECT)
    assert oldest is not None
    script = _script("te_releases", monkeypatch)
    assert f"{oldest[1]}.0" in script.VERSIONS
    run = (ROOT / ".ci" / "run").read_text()
    assert f"te_version={script.VERSIONS[-1]}\n" in run

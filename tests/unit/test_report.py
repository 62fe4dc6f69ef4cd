"""The report: text, JSON, and what it says in which case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.report import Finding, Report, ReportStep
from deferred_init.report_text import bytes_text


def _finding(number: int = 0, severity: str = "error") -> Finding:
    return Finding(
        code="broken-tie",
        fqn=f"layers.{number}.weight",
        message="expected one object, found two; assign one to the other",
        severity=severity,  # type: ignore[arg-type]
    )


def _steps(count: int) -> tuple[ReportStep, ...]:
    return tuple(
        ReportStep(
            fqn=f"transformer.layers.{i}.attention.self.output_projection_with_name",
            module_class="LinearWithAVeryLongClassName",
            initializer="torch.nn",
            source="Linear.reset_parameters",
            num_tensors=2,
            num_bytes=10**12,
            seconds=0.25,
        )
        for i in range(count)
    )


def _full() -> Report:
    return Report(
        findings=(_finding(), _finding(1, "warning")),
        device="cuda:0",
        recipe="fp8_current",
        rng="eager",
        steps=_steps(3),
        notes=("a note " * 40,),
        assumptions=("the order of construction is that of the module tree",),
        rebound=("a.weight",),
        final_bytes=3 * 10**12,
        peak_bytes=4 * 10**12,
        predicted_peak_bytes=4 * 10**12,
        seconds={"plan": 0.5, "execute": 1.0},
    )


def test_ok_means_no_errors_and_warnings_do_not_count() -> None:
    assert Report().ok
    assert Report(findings=(_finding(severity="warning"),)).ok
    assert not Report(findings=(_finding(),)).ok


def test_json_goes_there_and_back() -> None:
    report = _full()
    assert Report.from_json(report.to_json()) == report
    assert Report.from_dict(report.to_dict()) == report
    assert report.to_dict()["ok"] is False
    assert next(iter(report.to_dict())) == "ok"


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a report has no \['stpes'\]; expected"):
        Report.from_dict({"stpes": []})
    with pytest.raises(ValueError, match="expected a JSON object, found list"):
        Report.from_json("[]")


def test_the_text_fits_100_columns_and_puts_findings_first() -> None:
    lines = str(_full()).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("Materialized: NOT READY, 1 error, 1 warning; 6 tensors")
    assert "4.00 TB" in " ".join(lines[:2])
    assert lines[1].startswith("  x `layers.0.weight` [broken-tie] expected one object")
    assert any(line.startswith("  ! `layers.1.weight`") for line in lines)


def test_alike_modules_share_one_row_with_their_sum() -> None:
    steps = tuple(
        ReportStep(
            fqn=f"h.{i}.fc.7",
            module_class="Linear",
            initializer="torch.nn",
            num_tensors=2,
            num_bytes=40,
        )
        for i in range(12)
    )
    text = str(Report(device="cpu", steps=steps))
    row = next(line for line in text.splitlines() if "h.0..11.fc.7 x12" in line)
    assert row.split()[-3:] == ["24", "480", "0.0"]
    assert "24 tensors of 12 modules" in text


def test_long_lists_are_cut_and_say_how_much_is_missing() -> None:
    findings = tuple(_finding(i) for i in range(50))
    steps = tuple(
        ReportStep(fqn=f"m{'x' * i}", module_class="M", initializer="i")
        for i in range(60)
    )
    notes = tuple(f"note {i}" for i in range(25))
    text = str(Report(device="cpu", findings=findings, steps=steps, notes=notes))
    assert "... and 30 more findings" in text
    assert "... and 20 more rows" in text
    assert "... and 5 more notes" in text


def test_an_audit_alone_says_that_it_is_one() -> None:
    report = di.audit(nn.Linear(2, 2))
    assert str(report).startswith("Audit: ready\n")
    assert report.device is None
    assert report.steps == ()


def test_where_nothing_was_deferred_the_text_says_so() -> None:
    report = di.materialize(nn.Linear(2, 2), "cpu")
    assert report.ok
    assert "nothing was deferred" in str(report)


def test_a_real_report_names_versions_stages_and_sources() -> None:
    report = di.materialize(nn.Linear(2, 2, device="meta"), "cpu")
    assert report.versions["torch"] == torch.__version__
    assert report.versions["deferred_init"] == di.__version__
    assert {"plan", "execute", "audit"} <= report.seconds.keys()
    assert [step.seconds > 0 for step in report.steps] == [True]
    assert "(root)" in str(report)
    assert "Linear.reset_parameters" in str(report)
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1 bytes"), (1500, "1.50 kB"), (2 * 10**6, "2.00 MB"), (10**12, "1.00 TB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_a_report_is_saved_in_the_format_of_the_ending(tmp_path: Path) -> None:
    report = di.materialize(di.deferred_init(nn.Linear, 4, 4), "cpu", seed=0)
    for ending in ("html", "json", "txt", "png"):
        report.save(tmp_path / f"report.{ending}")
    assert Report.from_json((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.txt").read_text() == f"{report}\n"
    assert (tmp_path / "report.html").read_text() == f"{report.to_html()}\n"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as \.html, \.json, \.txt or \.png, found"):
        Report().save(tmp_path / "report.pdf")


def test_a_picture_of_a_report_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no steps, so there is no curve"):
        Report().save(tmp_path / "report.png")


def test_a_picture_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = di.materialize(di.deferred_init(nn.Linear, 4, 4), "cpu", seed=0)
    with pytest.raises(ImportError, match=r'pip install "deferred-init\[report\]"'):
        report.save(tmp_path / "report.png")


def test_no_tag_of_a_name_ends_the_data_of_the_page() -> None:
    page = Report(notes=("</script><script>alert(1)</script>",)).to_html()
    assert page.count("</script>") == 2


def test_the_bytes_of_a_step_are_divided_by_format() -> None:
    model = nn.BatchNorm1d(3, device="meta", dtype=torch.bfloat16)
    (step,) = di.materialize(model, "cpu", seed=0).steps
    assert step.bytes_by_format == {"bfloat16": 4 * 3 * 2, "int64": 8}
    assert sum(step.bytes_by_format.values()) == step.num_bytes

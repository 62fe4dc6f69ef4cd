"""The report as plain text of at most 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deferred_init.report import Finding, Report, ReportStep

__all__ = ["bytes_text", "report_text", "step_table", "wrapped"]

_WIDTH = 100
_MAX_ROWS = 40
_MAX_LINES = 20
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


def report_text(report: Report) -> str:
    """Return the whole report, findings first."""
    parts = [
        wrapped(_headline(report), ""),
        _finding_lines(report.findings),
        list(step_table(report.steps)),
        _list_lines("rebound to a new object", report.rebound),
        _list_lines("assumed", report.assumptions),
        _list_lines("notes", report.notes),
        [_footer(report)],
    ]
    return "\n".join(line for part in parts for line in part)


def bytes_text(num_bytes: int) -> str:
    """Write a size for people, with the unit that fits: `1.50 GB`.

    >>> bytes_text(999), bytes_text(1_500_000_000)
    ('999 bytes', '1.50 GB')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _headline(report: Report) -> str:
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    verdict = "ready" if report.ok else f"NOT READY, {_count(errors, 'error')}"
    if warnings:
        verdict += f", {_count(warnings, 'warning')}"
    if report.device is None:
        return f"Audit: {verdict}"
    if not report.steps:
        return f"Materialized: {verdict}; nothing was deferred, nothing was done"
    tensors = sum(step.num_tensors for step in report.steps)
    line = (
        f"Materialized: {verdict}; {_count(tensors, 'tensor')} of "
        f"{_count(len(report.steps), 'module')}, {bytes_text(report.final_bytes)} "
        f"on {report.device}"
    )
    if report.peak_bytes is not None:
        line += f", peak {bytes_text(report.peak_bytes)}"
    elif report.predicted_peak_bytes is not None:
        line += f", predicted peak {bytes_text(report.predicted_peak_bytes)}"
    return line


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    lines = []
    for finding in ordered[:_MAX_LINES]:
        sign = "x" if finding.severity == "error" else "!"
        lines += wrapped(str(finding), f"  {sign} ")
    return lines + _more(len(ordered), _MAX_LINES, "findings")


@dataclass(frozen=True, slots=True)
class _Row:
    """Modules that are alike but for the numbers in their names."""

    name: str
    step: ReportStep
    count: int
    numbers: tuple[tuple[int, ...], ...]


def step_table(steps: Sequence[ReportStep], *, timed: bool = True) -> Iterator[str]:
    """Yield a table with one row for steps that are alike but for their numbers.

    Args:
        steps: What was done, or will be.
        timed: Whether to show how long it took.
    """
    rows = _grouped(steps)
    if not rows:
        return
    yield _line("module", "class", "values from", "num", "bytes", "ms" if timed else "")
    for row in rows[:_MAX_ROWS]:
        step = row.step
        name = _name(row)
        suffix = f" x{row.count}" if row.count > 1 else ""
        yield _line(
            _cut(name, 33 - len(suffix)) + suffix,
            step.module_class,
            step.source or step.initializer,
            f"{step.num_tensors}",
            f"{step.num_bytes:,}"
            if step.num_bytes < 1e10
            else bytes_text(step.num_bytes),
            f"{step.seconds * 1e3:.1f}" if timed else "",
        )
    yield from _more(len(rows), _MAX_ROWS, "rows")


def _line(*cells: str) -> str:
    module, kind, source, tensors, num_bytes, ms = cells
    return (
        f"  {_cut(module, 33):<33} {_cut(kind, 14):<14} {_cut(source, 23):<23}"
        f" {tensors:>4} {num_bytes:>13} {ms:>6}"
    ).rstrip()


def _grouped(steps: Iterable[ReportStep]) -> list[_Row]:
    """Put steps together that differ only in numbers of their names, and add up."""
    rows: dict[tuple[object, ...], _Row] = {}
    for step in steps:
        numbers = tuple(int(number) for number in _NUMBER.findall(step.fqn))
        pattern = _NUMBER.sub("#", step.fqn)
        key = (pattern, step.module_class, step.initializer, step.source)
        old = rows.get(key)
        if old is None:
            rows[key] = _Row(pattern, step, 1, (numbers,))
            continue
        total = replace(
            old.step,
            num_tensors=old.step.num_tensors + step.num_tensors,
            num_bytes=old.step.num_bytes + step.num_bytes,
            seconds=old.step.seconds + step.seconds,
        )
        rows[key] = _Row(pattern, total, old.count + 1, (*old.numbers, numbers))
    return list(rows.values())


def _name(row: _Row) -> str:
    """Write the name back: a number where all agree, else first..last."""
    columns = iter(zip(*row.numbers, strict=True))

    def column(_: re.Match[str]) -> str:
        numbers = next(columns)
        low, high = min(numbers), max(numbers)
        return str(low) if low == high else f"{low}..{high}"

    return re.sub("#", column, row.name) or "(root)"


def _list_lines(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    lines = [f"  {title}:"]
    for item in items[:_MAX_LINES]:
        lines += wrapped(item, "    - ")
    return lines + _more(len(items), _MAX_LINES, title)


def _footer(report: Report) -> str:
    parts = []
    if report.recipe is not None:
        parts.append(f"recipe={report.recipe}")
    if report.rng is not None:
        parts.append(f"rng={report.rng}")
    parts += [f"{stage} {value:.3f} s" for stage, value in report.seconds.items()]
    parts += [f"{name} {version}" for name, version in report.versions.items()]
    return "\n".join(wrapped(", ".join(parts), "  "))


def wrapped(text: str, first: str) -> list[str]:
    """Break a text into lines; the first begins with `first`, the others below it."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def _more(total: int, shown: int, what: str) -> list[str]:
    return [f"    ... and {total - shown} more {what}"] if total > shown else []


def _cut(text: str, width: int) -> str:
    """Shorten from the left end: names differ at their right."""
    return text if len(text) <= width else f"..{text[len(text) - width + 2 :]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""The HTML report in a real browser: it draws, sorts, filters, and asks for nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.report import Finding

sys.path.insert(0, str(Path(__file__).parent))

from chromium import Browser, find_chromium

_CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    _CHROMIUM is None,
    reason="needs a Chromium (apt-get install chromium), and none is on the path",
)
_SHOTS = os.environ.get("DEFERRED_INIT_SCREENSHOTS")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6)
        self.register_buffer("steps", torch.arange(5000))
        self.head = nn.Linear(64, 2000, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def report() -> di.Report:
    return di.materialize(di.deferred_init(_Model), "cpu", seed=0)


@pytest.fixture(scope="module")
def broken(report: di.Report) -> di.Report:
    findings = (
        Finding(
            code="padding-row",
            fqn="embed.weight",
            message="the row is not zero",
            severity="warning",
        ),
        Finding(
            code="broken-tie",
            fqn="head.weight",
            message='</script><b id="injected">expected one object</b>',
        ),
    )
    return replace(report, findings=findings, notes=("a note",))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert _CHROMIUM is not None
    found = Browser(_CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Any:
    def opened(report: di.Report, width: int = 1200, dark: bool = False) -> Browser:
        report.save(tmp_path / "report.html")
        browser.problems.clear()
        browser.open(tmp_path / "report.html", width=width, dark=dark)
        if _SHOTS:
            shade = "dark" if dark else "light"
            name = f"{width}-{shade}-{len(report.steps)}-{len(report.findings)}.png"
            browser.screenshot(Path(_SHOTS) / name)
        return browser

    return opened


def _column(browser: Browser, index: int) -> list[str]:
    rows = "[...document.querySelectorAll('#steps tbody tr')]"
    script = f"{rows}.map(row => row.cells[{index}].textContent)"
    found: list[str] = browser.run(script)
    return found


def _press(browser: Browser, title: str) -> None:
    browser.run(
        "[...document.querySelectorAll('#steps th button')]"
        f".find(b => b.textContent === '{title}').click()"
    )


def test_the_page_opens_without_an_error_and_without_the_network(
    show: Any, report: di.Report
) -> None:
    browser = show(report)
    assert browser.problems == []
    assert browser.run("document.querySelector('h1').textContent") == (
        "Materialized: ready"
    )
    shown = browser.run("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert shown[1:5] == [
        "Bytes made over time",
        "Bytes by module and format",
        "Slowest steps",
        "Steps",
    ]
    assert browser.run("document.getElementById('findings-section').hidden") is True


def test_a_page_that_breaks_or_asks_for_something_is_noticed(
    browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<script src='http://127.0.0.1:9/x.js'></script><script>no()</script>"
    )
    browser.problems.clear()
    browser.open(page, width=800)
    found = " ".join(browser.problems)
    assert "asked for http://127.0.0.1:9/x.js" in found
    assert "no is not defined" in found


def test_every_step_is_a_row_and_the_headings_sort(
    show: Any, report: di.Report
) -> None:
    browser = show(report)
    assert _column(browser, 0) == [step.fqn or "(root)" for step in report.steps]
    _press(browser, "bytes")
    sizes = [int(text.replace(",", "")) for text in _column(browser, 1)]
    assert sizes == sorted((s.num_bytes for s in report.steps), reverse=True)
    _press(browser, "bytes")
    sizes = [int(text.replace(",", "")) for text in _column(browser, 1)]
    assert sizes == sorted(s.num_bytes for s in report.steps)
    _press(browser, "module")
    names = _column(browser, 0)
    assert names != [step.fqn or "(root)" for step in report.steps]
    assert names[0] == "(root)"
    sorted_by = "document.querySelector('#steps th[aria-sort]').textContent"
    assert browser.run(sorted_by) == "module"


def test_the_table_filters_by_name(show: Any, report: di.Report) -> None:
    browser = show(report)
    browser.run(
        "{const f = document.getElementById('filter'); f.value = 'LINEAR1';"
        "f.dispatchEvent(new Event('input'))}"
    )
    expected = [step.fqn for step in report.steps if "linear1" in step.fqn]
    assert len(expected) == 6
    assert _column(browser, 0) == expected
    count = browser.run("document.getElementById('count').textContent")
    assert count == f"6 of {len(report.steps)}"


def test_the_map_covers_its_box_in_proportion_to_the_bytes(
    show: Any, report: di.Report
) -> None:
    browser = show(report)
    cells = browser.run(
        "[...document.querySelectorAll('#map div')].map(c => ({title: c.title,"
        " area: parseFloat(c.style.width) * parseFloat(c.style.height)}))"
    )
    box = browser.run(
        "{const b=document.getElementById('map');b.clientWidth*b.clientHeight}"
    )
    assert sum(cell["area"] for cell in cells) == pytest.approx(box, rel=1e-3)
    area = {cell["title"].rpartition("\n")[0]: cell["area"] for cell in cells}
    share = 2000 * 64 * 4 / report.final_bytes
    assert area["embed\nfloat32"] / box == pytest.approx(share, rel=1e-3)
    legend = browser.run("document.getElementById('legend').textContent")
    for name in ("float32", "bfloat16", "int64"):
        assert name in legend


def test_the_curve_is_drawn_up_to_all_bytes(show: Any, report: di.Report) -> None:
    browser = show(report)
    path = browser.run("document.querySelector('#curve .line').getAttribute('d')")
    assert path.count("L") == len(report.steps)
    assert "NaN" not in path


def test_findings_come_first_with_their_names_and_errors_before_warnings(
    show: Any, broken: di.Report
) -> None:
    browser = show(broken)
    assert browser.problems == []
    assert browser.run("document.querySelector('h1').textContent") == (
        "Materialized: not ready, 1 error"
    )
    first = "[...document.querySelectorAll('#findings li')].map(i=>i.textContent)"
    found = browser.run(first)
    assert found[0].startswith("head.weight broken-tie")
    assert found[1].startswith("embed.weight padding-row")
    section = "document.querySelector('main section:not([hidden])').id"
    assert browser.run(section) == "findings-section"


def test_text_of_a_report_is_never_markup(show: Any, broken: di.Report) -> None:
    browser = show(broken)
    assert browser.run("document.getElementById('injected')") is None


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    show: Any, broken: di.Report, dark: bool
) -> None:
    browser = show(broken, width=390, dark=dark)
    assert browser.problems == []
    assert browser.run("document.documentElement.scrollWidth") <= 390


_CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = parse(text).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" ? ground(node.parentElement) : color;
  };
  const texts = document.querySelectorAll(
    "h1, h2, dt, dd, li, td, th, #count, #map div, footer");
  return Math.min(...[...texts].filter((n) => n.textContent.trim()).map((node) => {
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort();
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  }));
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_the_contrast_that_wcag_asks_for(
    show: Any, broken: di.Report, dark: bool
) -> None:
    browser = show(broken, dark=dark)
    assert browser.run(_CONTRAST) >= 4.5


def test_an_audit_alone_has_a_page_too(show: Any) -> None:
    browser = show(di.audit(nn.Linear(2, 2)))
    assert browser.problems == []
    assert browser.run("document.querySelector('h1').textContent") == "Audit: ready"
    assert browser.run("document.getElementById('steps-section').hidden") is True

"""The curve of the bytes made over time, as a picture."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deferred_init.report import Report

__all__ = ["save_plot"]


def save_plot(report: Report, path: Path) -> None:
    """Draw final bytes over host seconds, step by step, with matplotlib.

    Raises:
        ValueError: Nothing was made, so there is nothing to draw.
        ImportError: matplotlib is not installed; says how to get it.
    """
    if not report.steps:
        raise ValueError(
            "the report has no steps, so there is no curve to draw; save it as .html, "
            ".json or .txt"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a picture needs matplotlib, which could not be imported ({error}); "
            'install it with pip install "deferred-init[report]"'
        ) from error
    seconds = [0.0, *accumulate(step.seconds for step in report.steps)]
    gigabytes = [0.0, *accumulate(step.num_bytes / 1e9 for step in report.steps)]
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(seconds, gigabytes, label="made")
    if report.peak_bytes is not None:
        axes.axhline(report.peak_bytes / 1e9, linestyle="--", label="measured peak")
        axes.legend()
    axes.set(xlabel="seconds", ylabel="GB", ylim=(0, None), xlim=(0, None))
    figure.savefig(path, dpi=150)

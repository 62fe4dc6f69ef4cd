"""A progress bar in bytes: tqdm, only on a terminal and only for longer work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deferred_init.handlers.protocol import Step
from deferred_init.plan import Plan

__all__ = ["progress_bar"]

_LOG_INTERVAL_S = 10.0
_DELAY_S = 1.0


@contextmanager
def progress_bar(
    plan: Plan, progress: bool | None = None
) -> Iterator[Callable[[Step], None]]:
    """Yield a function to be called after each step.

    Args:
        plan: Tells the total in bytes.
        progress: True shows a bar at once, also in a log (one line per 10 s);
            None shows one on a terminal if the work takes more than a second;
            False never. Only rank 0 of a distributed job shows anything.
    """
    terminal = sys.stderr.isatty()
    hidden = progress is False or (progress is None and not terminal)
    if hidden or not plan.steps or os.environ.get("RANK", "0") != "0":
        yield lambda step: None
        return
    from tqdm import tqdm

    bar = tqdm(
        total=plan.final_bytes,
        desc="materialize",
        unit="B",
        unit_scale=True,
        delay=0.0 if progress else _DELAY_S,
        mininterval=0.1 if terminal else _LOG_INTERVAL_S,
        dynamic_ncols=terminal,
    )
    with bar:

        def advance(step: Step) -> None:
            bar.update(step.num_bytes)

        yield advance

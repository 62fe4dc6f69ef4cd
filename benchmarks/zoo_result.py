"""What comes of one architecture of a zoo, how long it may take, where it is kept."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SEED = 1234


@dataclass(kw_only=True)
class Result:
    """What came of one case.

    `status` is `equal`, `different`, `error`, `unbuildable` (eagerly), `too large`
    or `timeout`.
    """

    name: str
    status: str
    cause: str = ""
    num_parameters: int = 0
    num_tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class TooSlowError(Exception):
    """A case took longer than its limit."""


def seed_everything() -> None:
    """Seed every generator that a constructor may use."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` in the main thread after some seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cause(error: BaseException) -> str:
    """Return an error in one line, with the place where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


def names_in(path: Path) -> set[str]:
    """Return the names of the cases that a results file holds."""
    if not path.exists():
        return set()
    return {json.loads(line)["name"] for line in path.read_text().splitlines()}

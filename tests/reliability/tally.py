"""Counts what a run did, for the figures in `docs/reliability.md`."""

from __future__ import annotations

from collections import Counter

tally: Counter[str] = Counter()

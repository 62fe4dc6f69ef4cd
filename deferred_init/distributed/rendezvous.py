"""A meeting of ranks at the job's key-value store: small, on the CPU, with a time-out.

[Note: Why the store and not a collective]
Problem: ranks have to find out that they disagree, or that one of them failed, and must
never hang over it. A collective of a process group hangs until the group's own
time-out (minutes) if one rank does not come, says nothing about who did not, works on
an accelerator's stream, and exists only for groups that were made beforehand.

Design: every rank puts its answer under a key; the first rank of the meeting reads all
of them, judges, and puts the verdict under another key, which all wait for. That is
one small gather and one broadcast, for any set of ranks, and whoever is missing is
known by name.

A rank that fails comes to the next meeting, whatever that one is about, and says so:
all others raise `RanksFailed` there and need not meet again to know of it.

Shortcoming: the first rank reads one answer per rank, so answers must be small.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from deferred_init.errors import DeferredInitError

__all__ = ["Meeting", "RanksFailed", "RanksMissing", "spell_ranks"]

T = TypeVar("T")
_GRACE_S = 5.0
_rounds: dict[tuple[int, ...], int] = {}


class RanksMissing(DeferredInitError):
    """Some ranks did not come to a meeting in time."""


class RanksFailed(DeferredInitError):
    """Some ranks came to a meeting only to say that they failed; all know it."""


class _Failure(NamedTuple):
    """The answer of a rank that failed, to whatever was asked."""

    text: str


class Meeting:
    """A set of ranks that decide something together.

    Args:
        ranks: Global ranks, this one among them.
        timeout_s: How long to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = tuple(sorted(ranks))
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        store = dist.distributed_c10d._get_default_store()
        prefix = "deferred_init/" + spell_ranks(self.ranks).replace(" ", "")
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def decide(self, answer: Any, judge: Callable[[Mapping[int, Any]], T]) -> T:
        """Let the first rank judge all answers; every rank returns its verdict.

        Args:
            answer: This rank's, something small that can be pickled.
            judge: Called on the first rank with the answers by rank.

        Raises:
            RanksMissing: If a rank did not come within the time-out; raised on all
                that did.
            RanksFailed: If a rank came to say that it failed; raised on all.
        """
        turn = _rounds[self.ranks] = _rounds.get(self.ranks, -1) + 1
        self._store.set(f"{turn}/{self._rank}", pickle.dumps(answer))  # type: ignore[arg-type]
        if self._rank != self.ranks[0]:
            verdict = self._wait_for_verdict(turn)
        else:
            verdict = self._judge(turn, judge)
            self._store.set(f"{turn}/verdict", pickle.dumps(verdict))  # type: ignore[arg-type]
            self._store.delete_key(f"{turn - 1}/verdict")
        if isinstance(verdict, (RanksMissing, RanksFailed)):
            raise verdict
        return verdict  # type: ignore[no-any-return]

    def fail(self, text: str) -> None:
        """Tell the others, at the next meeting that they come to, of a failure here."""
        with suppress(RanksMissing, RanksFailed):
            self.decide(_Failure(text), _nothing)

    def _judge(self, turn: int, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        deadline = time.monotonic() + self._timeout_s
        answers: dict[int, Any] = {}
        missing = []
        for rank in self.ranks:
            key = f"{turn}/{rank}"
            if self._arrived(key, deadline - time.monotonic()):
                answers[rank] = pickle.loads(self._store.get(key))
                self._store.delete_key(key)
            else:
                missing.append(rank)
        if missing:
            return RanksMissing(
                f"{_s(missing, 'rank')} {spell_ranks(missing)} of "
                f"{spell_ranks(self.ranks)} did not come within "
                f"{self._timeout_s:g} s. Every rank that holds a part of the model has "
                "to make the same call; see what the missing ones last did"
            )
        failures = {r: a.text for r, a in answers.items() if isinstance(a, _Failure)}
        return _failed(failures) if failures else judge(answers)

    def _wait_for_verdict(self, turn: int) -> Any:
        key = f"{turn}/verdict"
        wait_s = self._timeout_s + _GRACE_S
        if self._arrived(key, wait_s):
            return pickle.loads(self._store.get(key))
        return RanksMissing(
            f"rank {self.ranks[0]} did not come within {wait_s:g} s. Every rank that "
            "holds a part of the model has to make the same call; see what the "
            "missing one last did"
        )

    def _arrived(self, key: str, wait_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(wait_s, 0.001)))
        except dist.DistStoreError:
            return False
        return True


def spell_ranks(ranks: Sequence[int]) -> str:
    """Spell ranks with runs joined.

    >>> spell_ranks([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )


def _failed(failures: Mapping[int, str]) -> RanksFailed:
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    return RanksFailed(
        "; ".join(
            f"it failed on {_s(ranks, 'rank')} {spell_ranks(ranks)}: {text}"
            for text, ranks in by_text.items()
        )
    )


def _nothing(answers: Mapping[int, Any]) -> None:
    """Judge nothing: this rank's own failure is the verdict."""


def _s(items: Sequence[object], noun: str) -> str:
    return noun if len(items) == 1 else f"{noun}s"

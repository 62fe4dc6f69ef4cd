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

A rank that fails comes to the next meeting, whatever that one is about, says so, and
waits for nobody: all others raise `RanksFailed` there and need not meet again to know
of it. So does one that gives up waiting.

Meetings are counted, and ranks that make different calls (`plan` on the first one only)
meet nevertheless. Every answer says what it is about; if they differ, all are told, and
the next meeting is one of ranks that are in step again.

Shortcoming: the first rank reads one answer per rank, so answers must be small.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from deferred_init.errors import DeferredInitError

__all__ = ["Meeting", "RanksFailed", "RanksMissing", "by_answer", "spell_ranks"]
__all__ += ["spell_who"]

T = TypeVar("T")
_GRACE_S = 5.0
_rounds: dict[tuple[int, ...], int] = {}
_unread: dict[tuple[int, ...], list[str]] = {}
"""Keys that somebody may still read, until all have come to a later meeting."""


class RanksMissing(DeferredInitError):
    """Some ranks did not come to a meeting in time."""


class RanksFailed(DeferredInitError):
    """Some ranks failed, or are in another call; all know it."""


class _Failure(NamedTuple):
    """The answer of a rank that failed, to whatever was asked."""

    text: str


class Meeting:
    """A set of ranks that decide something together.

    Args:
        ranks: Global ranks, this one among them.
        timeout_s: How long to wait for the others.
        about: What it is about, as it is named where ranks are in different calls.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float, about: str) -> None:
        self.ranks = tuple(sorted(ranks))
        self._about = about
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
            RanksFailed: If a rank came to say that it failed, or with an answer to
                another question; raised on all.
        """
        turn = self._next_turn()
        if self._rank != self.ranks[0]:
            self._come_in_time(turn)
        self._put(f"{turn}/{self._rank}", (self._about, answer))
        if self._rank != self.ranks[0]:
            verdict = self._wait_for_verdict(turn)
        else:
            verdict = self._judge(turn, judge)
            self._put(f"{turn}/verdict", verdict)
        if isinstance(verdict, (RanksMissing, RanksFailed)):
            raise verdict
        return verdict  # type: ignore[no-any-return]

    def fail(self, text: str) -> None:
        """Tell the others, at the next meeting that they come to, of a failure here.

        Waits for nobody.
        """
        turn = self._next_turn()
        with suppress(RanksMissing):  # nobody is left who could be told
            if self._rank == self.ranks[0]:
                self._put(f"{turn}/verdict", _failed({self._rank: text}))
                return
            while isinstance(self._verdict(turn), RanksMissing):  # it is over
                turn = self._next_turn()
            self._put(f"{turn}/{self._rank}", (self._about, _Failure(text)))

    def _next_turn(self) -> int:
        turn = _rounds[self.ranks] = _rounds.get(self.ranks, -1) + 1
        return turn

    def _come_in_time(self, turn: int) -> None:
        """Raise if the meeting is over; see to it that the next one finds all in step.

        Raises:
            RanksMissing: The others waited for this rank in vain.
        """
        missed = self._verdict(turn)
        if not isinstance(missed, RanksMissing):
            return
        while self._verdict(turn) is not None:
            turn = self._next_turn()
        late = _Failure(f"it came to {self._about} too late for the others")
        self._put(f"{turn}/{self._rank}", (self._about, late))
        raise RanksMissing(f"{missed}. This rank came too late")

    def _verdict(self, turn: int) -> Any:
        """Return the verdict of a meeting, or None if there is none yet."""
        key = f"{turn}/verdict"
        with _reachable():
            if not self._store.check([key]):
                return None
            return pickle.loads(self._store.get(key))

    def _judge(self, turn: int, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        deadline = time.monotonic() + self._timeout_s
        answers: dict[int, Any] = {}
        missing = []
        for rank in self.ranks:
            key = f"{turn}/{rank}"
            if self._arrived(key, deadline - time.monotonic()):
                answers[rank] = pickle.loads(self._store.get(key))
            else:
                missing.append(rank)
        unread = _unread.setdefault(self.ranks, [])
        if not missing:  # all have read what was said before
            for key in unread:
                self._store.delete_key(key)
            unread.clear()
        unread += [f"{turn}/verdict", *(f"{turn}/{rank}" for rank in self.ranks)]
        failures = {
            r: a.text for r, (_, a) in answers.items() if isinstance(a, _Failure)
        }
        if failures:
            return _failed(failures)
        if missing:
            return RanksMissing(
                f"{spell_who(missing)} of "
                f"{spell_ranks(self.ranks)} did not come within "
                f"{self._timeout_s:g} s. Every rank that holds a part of the model has "
                "to make the same call; see what the missing ones last did"
            )
        return _apart(answers) or _judged(
            judge, {r: a for r, (_, a) in answers.items()}
        )

    def _wait_for_verdict(self, turn: int) -> Any:
        key = f"{turn}/verdict"
        wait_s = self._timeout_s + _GRACE_S
        if self._arrived(key, wait_s):
            return pickle.loads(self._store.get(key))
        gone = _Failure(f"it waited {wait_s:g} s for rank {self.ranks[0]}")
        self._put(f"{turn}/{self._rank}", (self._about, gone))
        return RanksMissing(
            f"rank {self.ranks[0]} did not come within {wait_s:g} s. Every rank that "
            "holds a part of the model has to make the same call; see what the "
            "missing one last did"
        )

    def _put(self, key: str, value: Any) -> None:
        with _reachable():
            self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def _arrived(self, key: str, wait_s: float) -> bool:
        """Wait for an answer; False if it does not come in time.

        Stores say that with errors of several classes: a file store with a plain
        `RuntimeError`, of which that of a lost connection is a kind too.
        """
        with _reachable():
            try:
                self._store.wait([key], timedelta(seconds=max(wait_s, 0.001)))
            except dist.DistNetworkError:
                raise
            except RuntimeError:
                return False
        return True


@contextmanager
def _reachable() -> Iterator[None]:
    """Take it for missing ranks if the process that has the store is gone."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RanksMissing(
            "the job's key-value store cannot be reached any more: the process that "
            f"has it, which is that of rank 0 unless torchrun does, has ended ({error})"
        ) from error


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


def spell_who(ranks: Sequence[int]) -> str:
    """Spell ranks with the noun.

    >>> spell_who([2, 3])
    'ranks 2-3'
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spell_ranks(ranks)}"


def by_answer(answers: Mapping[int, Any]) -> dict[str, list[int]]:
    """Return the ranks that gave each answer."""
    groups: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        groups.setdefault(str(answer), []).append(rank)
    return groups


def _failed(failures: Mapping[int, str]) -> RanksFailed:
    return RanksFailed(
        "; ".join(
            f"it failed on {spell_who(ranks)}: {text}"
            for text, ranks in by_answer(failures).items()
        )
    )


def _apart(answers: Mapping[int, tuple[str, Any]]) -> RanksFailed | None:
    """Say which ranks are in which call, if that is not the same everywhere."""
    by_call = by_answer({rank: about for rank, (about, _) in answers.items()})
    if len(by_call) == 1:
        return None
    calls = ", ".join(f"{about} on {spell_who(r)}" for about, r in by_call.items())
    return RanksFailed(
        f"the ranks make different calls: {calls}. Every rank that holds a part of the "
        "model has to make the same calls in the same order, `plan` too"
    )


def _judged(judge: Callable[[Mapping[int, Any]], Any], answers: Any) -> Any:
    """Let an error in the judgement be the verdict, since all wait for one."""
    try:
        return judge(answers)
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return RanksFailed(f"comparing them failed: {type(error).__name__}: {error}")

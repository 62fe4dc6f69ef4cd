"""The undo log: frames that would hold views, and impatient users."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from deferred_init.undo import UndoLog


class _Held:
    """Stands for a view in a local variable of code that failed."""


def _fail(seen: list[weakref.ref[_Held]]) -> None:
    held = _Held()
    seen.append(weakref.ref(held))
    raise ValueError("first")


def _fail_while_handling(seen: list[weakref.ref[_Held]]) -> None:
    try:
        _fail(seen)
    except ValueError:
        raise RuntimeError("second") from None


def _fail_because_of(seen: list[weakref.ref[_Held]]) -> None:
    with pytest.raises(ValueError, match="first") as found:
        _fail(seen)
    raise RuntimeError("second") from found.value


@pytest.mark.parametrize("fail", [_fail_while_handling, _fail_because_of])
def test_frames_of_an_error_and_of_what_led_to_it_let_go_of_their_variables(
    fail: Callable[[list[weakref.ref[_Held]]], None],
) -> None:
    seen: list[weakref.ref[_Held]] = []
    with pytest.raises(RuntimeError, match="second") as found:
        fail(seen)
    assert seen[0]() is not None
    assert UndoLog().rollback(found.value) == []
    assert seen[0]() is None


def test_errors_that_lead_to_each_other_come_to_an_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert UndoLog().rollback(first) == []


def test_each_interrupted_action_is_repeated_ten_times_and_then_passed_over() -> None:
    calls: list[str] = []
    log = UndoLog()

    def impatient(name: str) -> None:
        calls.append(name)
        raise KeyboardInterrupt

    log.push(lambda: calls.append("last"))
    log.push(lambda: impatient("b"))
    log.push(lambda: impatient("a"))
    failures = log.rollback()
    assert [type(error) for error in failures] == [KeyboardInterrupt] * 2
    assert calls == ["a"] * 10 + ["b"] * 10 + ["last"]
    assert not len(log)

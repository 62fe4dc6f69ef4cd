"""Laws that hold for every module tree, whatever is in it.

A failing example prints its program, which is the input of `trees.build`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deferred_init as di
from deferred_init import workspace
from deferred_init.record.execution import Executor
from tests.reliability.faults import Injected
from tests.reliability.made import eager, on_meta, recorded
from tests.reliability.portrait import (
    Portrait,
    assert_equal,
    generators,
    portrait,
    seed,
)
from tests.reliability.tally import tally
from tests.reliability.trees import CONVENTIONAL, Program, programs

# Found in eager models too: two Parameters on one memory, a padding row that was
# written, and the like are what the programs ask for.
DELIBERATE = {"duplicate-storage", "padding-row"}


def findings_of(model: nn.Module) -> Counter[tuple[str, str]]:
    found = di.audit(model, verify="full").findings
    return Counter((finding.code, finding.fqn) for finding in found)


def assert_names_a_tensor(error: di.PlanError) -> None:
    assert "`" in str(error)


def assert_done_as_planned(plan: di.Plan, report: di.Report) -> None:
    planned = [
        (s.index, s.site.fqn, s.initializer.name, s.num_bytes) for s in plan.steps
    ]
    done = [
        (index, step.fqn, step.initializer, step.num_bytes)
        for index, step in enumerate(report.steps)
    ]
    assert done == planned


@given(programs())
def test_a_recorded_tree_equals_the_eager_one_bit_for_bit(program: Program) -> None:
    model, expected, states = eager(program)
    deferred = recorded(program)
    plan = di.plan(deferred, "cpu")
    report = di.materialize(deferred, "cpu", verify="full", strict=False)
    found = Portrait(deferred)
    assert_equal(found.facts, expected)
    if found.tensors:  # a recording without tensors is not kept anywhere
        assert generators() == states
    assert plan.final_bytes == found.num_bytes == report.final_bytes
    assert_done_as_planned(plan, report)
    audited = findings_of(deferred)
    assert audited == findings_of(model)
    codes = {code for code, _ in audited} | {f.code for f in report.findings}
    assert codes <= DELIBERATE
    event("healthy" if not codes else "with deliberate findings")


@given(programs())
def test_materializing_twice_is_materializing_once(program: Program) -> None:
    _, expected, _ = eager(program)
    model = recorded(program)
    di.materialize(model, "cpu", strict=False)
    states = generators()
    report = di.materialize(model, "cpu", seed=9, strict=False)
    assert_equal(portrait(model), expected)
    assert generators() == states
    assert not report.steps


@given(programs())
def test_a_plan_and_an_audit_change_nothing(program: Program) -> None:
    model = recorded(program)
    before, states = portrait(model), generators()
    di.plan(model, "cuda")
    di.audit(model, verify="full")
    assert_equal(portrait(model), before)
    assert generators() == states


@given(programs())
def test_a_tree_on_meta_is_made_whole_or_refused_by_name(program: Program) -> None:
    try:
        model = on_meta(program)
    except RuntimeError:  # `.item()` on meta; recording is the remedy
        event("cannot be built on meta")
        return
    before, states = portrait(model), generators()
    try:
        plan = di.plan(model, "cpu", seed=0)
        report = di.materialize(model, "cpu", seed=0, verify="full", strict=False)
    except di.PlanError as error:
        event("refused")
        assert_names_a_tensor(error)
        assert_equal(portrait(model), before)
        assert generators() == states
        return
    event("made")
    assert_done_as_planned(plan, report)
    assert {finding.code for finding in report.findings} <= DELIBERATE
    found = portrait(model)
    assert found.keys() == before.keys()
    for path, fact in before.items():
        if isinstance(fact, dict):
            flags = ("class", "shape", "dtype", "stride", "requires_grad", "hooks")
            assert {k: fact[k] for k in flags} == {k: found[path][k] for k in flags}
            assert found[path]["device"] == "cpu"
        else:
            assert found[path] == fact


@given(programs(CONVENTIONAL))
def test_a_conventional_tree_on_meta_equals_the_eager_one(program: Program) -> None:
    _, expected, states = eager(program, conventional=True)
    try:
        model = on_meta(program, conventional=True)
    except RuntimeError:  # `orthogonal` looks at values
        event("cannot be built on meta")
        return
    try:
        report = di.materialize(model, "cpu", seed=0, strict=False)
    except di.PlanError as error:
        event("refused")
        assert_names_a_tensor(error)
        return
    if report.assumptions:
        event("made under assumptions")
        return
    event("made")
    assert_equal(portrait(model), expected)
    if report.steps:
        assert generators()[0] == states[0]


class _Fault(TorchDispatchMode):
    """Raises after the n-th operation on real memory, replayed node, or exchange."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at = at
        self.error = error
        self.seen = 0
        self._originals = {
            (Executor, "call"): Executor.call,
            (workspace, "exchange"): workspace.exchange,
        }

    def __enter__(self) -> _Fault:
        for (owner, name), function in self._originals.items():
            setattr(owner, name, self._counting(function))
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        for (owner, name), function in self._originals.items():
            setattr(owner, name, function)
        super().__exit__(*details)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._count()
            return result

        return counted

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise self.error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self._count()
        return result


FAULTS = pytest.mark.parametrize("error", [Injected, KeyboardInterrupt, MemoryError])
PLACES = st.integers(0, 1000)


@FAULTS
@given(program=programs(), place=PLACES)
def test_a_fault_in_a_replay_puts_everything_back(
    error: type[BaseException], program: Program, place: int
) -> None:
    check_a_fault(recorded, error, program, place)


@FAULTS
@given(program=programs(CONVENTIONAL), place=PLACES)
def test_a_fault_while_a_tree_on_meta_is_made_puts_everything_back(
    error: type[BaseException], program: Program, place: int
) -> None:
    check_a_fault(on_meta, error, program, place)


def check_a_fault(
    make: Callable[[Program], nn.Module],
    error: type[BaseException],
    program: Program,
    place: int,
) -> None:
    try:
        reference = make(program)
        seed(5)
        with _Fault(0, error()) as count:
            di.materialize(reference, "cpu", strict=False)
    except (di.PlanError, RuntimeError):
        event("refused")
        return
    if not count.seen:
        event("nothing to make")
        return
    done, states_done = portrait(reference), generators()
    model = make(program)
    seed(5)
    before, states = portrait(model), generators()
    expected = di.MaterializeError if issubclass(error, Exception) else error
    with (
        _Fault(place % count.seen + 1, error("on purpose")),
        pytest.raises(expected),
    ):
        di.materialize(model, "cpu", strict=False)
    assert_equal(portrait(model), before)
    assert generators() == states
    di.materialize(model, "cpu", strict=False)
    assert_equal(portrait(model), done)
    assert generators() == states_done
    tally["faults in operations"] += 1

"""Runs a plan: steps in order, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from deferred_init.distributed.rendezvous import RanksFailed, RanksMissing
from deferred_init.errors import MaterializeError
from deferred_init.handlers.protocol import Order, Session, Step, has_session
from deferred_init.plan import Plan
from deferred_init.rng import BY_NAME, ByName, Eager, GeneratorSnapshot
from deferred_init.slots import Slot
from deferred_init.staging import keeps_nothing
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["Execution", "all_or_nothing", "run_steps"]

OnStep = Callable[[Step], None]


@dataclass(slots=True, kw_only=True)
class Execution:
    """What running a plan yielded, for the report.

    Attributes:
        seconds: Host seconds by step index. CUDA work is not waited for.
        peak_bytes: Peak of the device allocator above its start, or None on
            devices that do not count.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    peak_bytes: int | None = None


@contextmanager
def all_or_nothing(
    workspace: ExecutionWorkspace, generators: GeneratorSnapshot
) -> Iterator[None]:
    """Undo everything that the body did through the workspace if it raises.

    Raises:
        MaterializeError: In place of an ordinary exception. Interrupts such as
            `KeyboardInterrupt` pass unchanged, after the same rollback.
    """
    try:
        yield
    except BaseException as error:
        failures = workspace.undo.rollback(error)
        generators.restore()
        if not isinstance(error, Exception):
            raise
        known = isinstance(error, MaterializeError)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        state = "The model, optimizers and generators were put back as they were."
        if failures:
            state = (
                f"Undoing it failed as well ({len(failures)} times, first "
                f"{failures[0]!r}): the model must not be used."
            )
        cause = error.__cause__ if known and error.__cause__ else error
        raise MaterializeError(f"{what}. {state}") from cause


def run_steps(
    plan: Plan,
    workspace: ExecutionWorkspace,
    policy: Eager | ByName,
    on_step: OnStep = lambda step: None,
) -> Execution:
    """Run all steps of a plan.

    Raises:
        MaterializeError: If a step fails, with its module's name. The caller
            rolls back, see `all_or_nothing`.
    """
    execution = Execution()
    last_writers = _last_writers(plan)
    device = plan.request.device
    sessions = _Sessions(plan, workspace)
    with _environment(device), _peak(device, execution):
        for step in plan.steps:
            start = time.perf_counter()
            try:
                final = last_writers.get(step.index, ())
                workspace.final_now = {slot.tensor_id for slot in final}
                sessions.advance_before(step)
                if policy.name in BY_NAME and keeps_nothing(step):
                    workspace.allocate(step.claim.slots)
                else:
                    with policy.step(step):
                        sessions.run(step)
                workspace.finish(final)
            except (RanksFailed, RanksMissing):  # which all ranks know already
                raise
            except Exception as error:
                name = step.site.title
                raise MaterializeError(
                    f"step {step.index + 1} of {len(plan.steps)}, `{name}` "
                    f"({step.claim.source or step.initializer.name}), failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
            execution.seconds[step.index] = time.perf_counter() - start
            on_step(step)
        sessions.advance_all(None)
    return execution


class _Sessions:
    """The initializers that keep something open from their first to the last step."""

    def __init__(self, plan: Plan, workspace: ExecutionWorkspace) -> None:
        self._workspace = workspace
        self._open: dict[int, Session] = {}
        by_initializer: dict[int, list[Step]] = {}
        for step in plan.steps:
            by_initializer.setdefault(id(step.initializer), []).append(step)
        for steps in by_initializer.values():
            initializer = steps[0].initializer
            if has_session(initializer):
                self._open[id(initializer)] = initializer.session(steps, workspace)

    def advance_before(self, step: Step) -> None:
        """Let the sessions draw what eager drew before another one's step."""
        for key, session in self._open.items():
            if key != id(step.initializer):
                session.advance(step.order)

    def advance_all(self, order: Order | None) -> None:
        """Let all sessions go on to a place in the order; None for the end."""
        for session in self._open.values():
            session.advance(order)

    def run(self, step: Step) -> None:
        """Run a step by its session, or by its initializer alone."""
        session = self._open.get(id(step.initializer)) if self._open else None
        if session is None:
            step.initializer.run(step, self._workspace)
        else:
            session.run(step)


def _last_writers(plan: Plan) -> dict[int, list[Slot]]:
    """For each step, the slots that no later step writes."""
    last: dict[int, tuple[int, Slot]] = {}
    for step in plan.steps:
        for slot in (*step.claim.slots, *step.claim.rewrites):
            last[slot.tensor_id] = (step.index, slot)
    written = {key: index for key, (index, _) in last.items()}
    for slot in plan.inventory.deferred:
        # What nobody claims lies in the memory of something that somebody does.
        if slot.tensor_id not in last:
            group = plan.inventory.groups[slot.tensor_id]
            steps = [written[id(m)] for m in group.members if id(m) in written]
            if steps:
                last[slot.tensor_id] = (max(steps), slot)
    by_step: dict[int, list[Slot]] = {}
    for index, slot in last.values():
        by_step.setdefault(index, []).append(slot)
    return by_step


@contextmanager
def _environment(device: torch.device) -> Iterator[None]:
    """The setting in which a constructor would have run on the device."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.device(device))
        if device.type not in ("cpu", "meta"):
            stack.enter_context(torch.get_device_module(device).device(device))
        stack.enter_context(_no_autocast(device))
        yield


def _no_autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def _peak(device: torch.device, execution: Execution) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield
    execution.peak_bytes = torch.cuda.max_memory_allocated(device) - before

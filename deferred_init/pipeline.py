"""The stages between arguments and report: look, plan, run, rebind, prove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deferred_init.distributed.agreement import agreed
from deferred_init.distributed.broadcast import hand_over, receiving_plan
from deferred_init.distributed.outcome import (
    failures_told,
    finish_together,
    proved_together,
)
from deferred_init.execute import Execution, all_or_nothing, run_steps
from deferred_init.fast.policy import Fast
from deferred_init.garbage import young_collections_wait
from deferred_init.handlers.checkpoint import CheckpointInitializer
from deferred_init.handlers.ecosystems import load_handlers
from deferred_init.handlers.protocol import Request
from deferred_init.handlers.registry import refreshers
from deferred_init.holders import check_holders, rebind_holders
from deferred_init.inventory import take_inventory
from deferred_init.loading.matching import WeightsRequest
from deferred_init.optimizer_state import fill_optimizer_state
from deferred_init.plan import Plan
from deferred_init.planner import make_plan
from deferred_init.progress import progress_bar
from deferred_init.report import Finding
from deferred_init.rng import BY_NAME, ByName, Eager, GeneratorSnapshot, seed_all
from deferred_init.slots import Inventory
from deferred_init.tensor_names import names_for
from deferred_init.validate import wrapper_problems
from deferred_init.workspace import ExecutionWorkspace

__all__ = ["look", "make_agreed_plan", "run_plan"]


@young_collections_wait()
def look(models: tuple[nn.Module, ...]) -> Inventory:
    """Take the inventory, with the handlers of every ecosystem in use loaded."""
    load_handlers()
    return take_inventory(models)


@young_collections_wait()
def make_agreed_plan(
    inventory: Inventory,
    request: Request,
    optimizers: tuple[Optimizer, ...],
    wanted: WeightsRequest | None,
    problems: Callable[[], Sequence[str]] = tuple,
    call: str = "`materialize`",
) -> Plan:
    """Make a plan on which all ranks that share the model agree.

    Args:
        inventory: This rank's model.
        request: This rank's arguments.
        optimizers: As in `materialize`.
        wanted: What shall be loaded.
        problems: Returns what else is in the way.
        call: What is called, as ranks in different calls are told.

    Raises:
        PlanError: If anything is unclaimed or impossible, here or on another rank.
    """

    def make() -> Plan:
        before = [
            *problems(),
            *wrapper_problems(inventory),
            *check_holders(inventory, optimizers),
        ]
        weights = None
        if wanted is not None:
            weights = CheckpointInitializer(inventory, request, wanted)
        return receiving_plan(
            inventory, request, lambda: make_plan(inventory, request, before, weights)
        )

    return agreed(inventory, request, make, call)


def run_plan(
    the_plan: Plan,
    optimizers: tuple[Optimizer, ...],
    holders: tuple[Any, ...],
    progress: bool | None,
    prove: Callable[[ExecutionWorkspace], list[Finding]],
) -> tuple[Execution, ExecutionWorkspace, list[Finding]]:
    """Run the plan, rebind and prove; all of it or nothing.

    Args:
        the_plan: What to run.
        optimizers: As in `materialize`.
        holders: As in `materialize`.
        progress: As in `materialize`.
        prove: Audits the result. What it finds undoes nothing; an interrupt or an
            exception does.
    """
    request, inventory = the_plan.request, the_plan.inventory
    models = [root.module for root in inventory.roots]
    with failures_told(models, "`materialize`", request.broadcast_from):
        generators = GeneratorSnapshot(request.device)
        workspace = ExecutionWorkspace(inventory, request)
    with all_or_nothing(workspace, generators):
        with (
            finish_together(inventory, request),
            progress_bar(the_plan, progress) as on_step,
        ):
            execution = run_steps(the_plan, workspace, _policy(the_plan), on_step)
            if request.rng in BY_NAME or not request.draws_unneeded:
                generators.restore()
            hand_over(the_plan, workspace.current)
            _rebind(the_plan, workspace, optimizers, holders)
        findings = proved_together(inventory, request, lambda: prove(workspace))
    return execution, workspace, findings


def _rebind(
    the_plan: Plan,
    workspace: ExecutionWorkspace,
    optimizers: tuple[Optimizer, ...],
    holders: tuple[Any, ...],
) -> None:
    """Bring everything up to date that is not a tensor of the model."""
    for text in fill_optimizer_state(optimizers, workspace.on_undo):
        workspace.note(f"made {text}")
    for refresher in refreshers():
        refresher.refresh(the_plan.inventory, holders, workspace)
    for place in rebind_holders(
        workspace.replaced, optimizers, holders, workspace.on_undo
    ):
        workspace.note(f"rebound {place}")


def _policy(the_plan: Plan) -> Eager | ByName:
    """Return the RNG policy; an eager one begins with the seed."""
    request = the_plan.request
    if request.rng in BY_NAME:
        assert request.seed is not None, "checked by make_request"
        policy = Fast if request.rng == "fast" else ByName
        return policy(request.seed, request.device, names_for(request))
    if request.seed is not None and the_plan.steps:
        seed_all(request.seed, request.device)
    return Eager()

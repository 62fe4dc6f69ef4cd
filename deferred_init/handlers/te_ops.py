"""Initializers for the operations of `te.ops`.

A basic op makes its own parameters in a hook that the fuser calls in the first
forward, after it has cached the old ones. Here the hook runs before any fuser, with
the recipe's quantizers in place, and what it makes is adopted by the old objects.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformer_engine.pytorch.ops.op import BasicOperation

from deferred_init.aliases import dense_bytes, is_sharded
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import (
    add_initializer,
    add_refresher,
    has_user_rule,
)
from deferred_init.record.paused import without_default_device
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.te.claims import claim_of_method
from deferred_init.te.fusers import FuserRefresher
from deferred_init.te.grouped import adopt_or_merge, is_grouped, lend_scratch
from deferred_init.te.op_parameters import MAKERS, makes
from deferred_init.te.quantization import Choice, choose, whole_bytes
from deferred_init.te.recipe_state import (
    is_recipe_state,
    is_stale,
    own_recipe_of_op,
    set_up_op,
)
from deferred_init.te.rng_trackers import restore_on_undo
from deferred_init.te.sharded import adopt_part, memory_for, stand_in

__all__ = ["BasicOpInit"]

_HOOK = "pre_first_fuser_forward"
_NO_WEIGHTS = Choice(
    quantized=False,
    built_quantized=False,
    te_recipe=None,
    own=True,
    keep_high_precision=False,
    inference=False,
)
"""What becomes of an op without weights that could be quantized."""


class BasicOpInit:
    """Runs a basic op's own hook, outside of the fuser."""

    name = "te.ops"
    composite = False
    makes_representation = True
    """Quantized storage, also where values are loaded."""
    runs_reset_parameters = True
    """Also where a subclass overrides it."""

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim the op's parameters and buffers, and recipe state without memory."""
        op: Any = site.module
        method = _method(op, request.device)
        if method is None:
            return None
        made = tuple(s for s in pending if s.owner is op and _is_mine(s))
        if not made and has_user_rule(type(op)):
            return None
        choice = _choice(site, request)
        late = [s for s in made if choice.quantized and _is_weight(s)]
        weights = [slot.tensor for slot in late]
        sizes = [dense_bytes(weight) for weight in weights]
        sharded = [weight for weight in weights if is_sharded(weight)]
        return claim_of_method(
            site,
            made,
            choice,
            request,
            method=method,
            quantized=late,
            # A grouped op makes all experts in one block.
            scratch_bytes=sum(sizes) + whole_bytes(choice, sharded),
            problems=(
                *_recipe_state_problem(site, choice),
                *_delayed_problem(site, choice),
            ),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Set up the recipe state, then run the hook or the reset method."""
        op: Any = step.site.module
        device = workspace.request.device
        choice = _choice(step.site, workspace.request)
        restore_on_undo(op, workspace)
        stale = is_stale(vars(op).get("_fp8_metas"), step.claim.slots, device)
        set_up_op(op, choice, stale=stale)
        if isinstance(vars(op).get("device"), torch.device):
            # Bias remembers the current device of the time of its construction.
            vars(op)["device"] = device
        if is_grouped(op) and device.type != "cuda":
            with choice.grad_mode():
                lend_scratch(op, device)
                op.reset_parameters()
                adopt_or_merge(op, _parameters(step), workspace)
        elif _method(op, device) == "reset_parameters":
            with workspace.filling(step), _init_context(op), choice.grad_mode():
                op.reset_parameters()
        else:
            with _init_context(op), choice.grad_mode():
                _run_hook(step, workspace)
        if choice.keep_high_precision and choice.quantized:
            workspace.note(
                f"`{step.site.fqn}`: Transformer Engine's ops do not keep the values "
                "from before quantization"
            )


def _run_hook(step: Step, workspace: Workspace) -> None:
    """Let the hook make everything, adopt what was claimed, put the rest back."""
    op: Any = step.site.module
    slots = _parameters(step)
    kept = [
        (slot, slot.read())
        for slot in step.site.slots
        if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER) and slot not in slots
    ]
    for slot, original in kept:
        blank = torch.empty(original.shape, dtype=original.dtype, device="meta")
        is_param = slot.kind is SlotKind.PARAMETER
        slot.write(nn.Parameter(blank) if is_param else blank)
    lends = _can_be_lent(op, slots)
    for slot in slots:
        if lends:
            slot.write(memory_for(slot, workspace.request.device))
        elif is_sharded(slot.tensor):
            slot.write(stand_in(slot))
    try:
        if lends:
            op.reset_parameters()
        getattr(op, _HOOK)()
        _check_device(slots, workspace.request.device)
        _adopt(op, slots, workspace)
    finally:
        for slot, original in kept:
            slot.write(original)


def _adopt(op: Any, slots: list[Slot], workspace: Workspace) -> None:
    """Adopt what a hook made."""
    if is_grouped(op):
        adopt_or_merge(op, slots, workspace)
        return
    for slot in slots:
        made = slot.read()
        if made is None or made.is_meta:
            raise RuntimeError(
                f"the hook of {type(op).__name__} left `{slot.name}` without memory"
            )
        if is_sharded(slot.tensor):
            adopt_part(slot, made, workspace)
        else:
            workspace.adopt(slot, made)
        if not slot.tensor.is_meta:
            slot.write(slot.tensor)


def _can_be_lent(op: Any, slots: list[Slot]) -> bool:
    """Whether TE makes the parameters of an op in memory that it is given.

    As its constructor does. What it finds on meta it allocates by `torch.empty_like`,
    see the note in `te/high_precision.py`.
    """
    makers = _makers(type(op))
    return (
        len(makers) == 2
        and not is_grouped(op)
        and all(map(_is_of_te, makers))
        and all(slot.name in ("weight", "bias") for slot in slots)
    )


def _init_context(op: Any) -> AbstractContextManager[object]:
    """Leave out the default device where TE's own code makes the parameters.

    It names the device of all that it allocates.
    """
    tracked = vars(op).get("_rng_state_tracker_function") is not None
    if tracked or not all(map(_is_of_te, _makers(type(op)))):
        return nullcontext()
    return without_default_device()


def _makers(kind: type) -> list[Any]:
    """Return the functions of a class that make its parameters."""
    found = [getattr(kind, name, None) for name in MAKERS]
    return [function for function in found if function is not None]


def _is_of_te(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.startswith("transformer_engine.")


def _check_device(slots: list[Slot], device: torch.device) -> None:
    for slot in slots:
        made = slot.read()
        if made is not None and not made.is_meta and made.device != device:
            raise RuntimeError(
                f"the hook of {type(slot.owner).__name__} made `{slot.name}` on "
                f"{made.device}, expected {device}: make it use the default device"
            )


def _method(op: Any, device: torch.device) -> str | None:
    """Name the method that makes an op's parameters on a device."""
    hook = getattr(type(op), _HOOK, None)
    has_hook = hook is not None and hook is not getattr(BasicOperation, _HOOK, None)
    if has_hook and device.type == "cuda":
        return _HOOK
    if hasattr(op, "reset_parameters"):
        return "reset_parameters"
    return _HOOK if has_hook else None


def _choice(site: ModuleSite, request: Request) -> Choice:
    op: Any = site.module
    flag = vars(op).get("_with_quantized_weight")
    if flag is None:
        return _NO_WEIGHTS
    own = own_recipe_of_op(op)
    return choose(site.fqn, request, built=bool(flag), own_recipe=own)


def _recipe_state_problem(site: ModuleSite, choice: Choice) -> tuple[str, ...]:
    if not choice.quantized or hasattr(site.module, "reset_recipe_state"):
        return ()
    return (
        f"{site.describe()} stores its weights quantized, but the ops of this "
        "Transformer Engine release have no `reset_recipe_state`: use a recipe that "
        "keeps weights in high precision, or name it in `high_precision_modules`",
    )


def _delayed_problem(site: ModuleSite, choice: Choice) -> tuple[str, ...]:
    if not choice.quantized or choice.te_recipe is None:
        return ()
    joins = getattr(site.module, "single_grouped_weight", False)
    if not (joins and choice.te_recipe.delayed()):
        return ()
    return (
        f"{site.describe()} joins its weights into one, which Transformer Engine does "
        "not do with delayed scaling: build it with `single_grouped_weight=False`, "
        "take another recipe, or name it in `high_precision_modules`",
    )


def _parameters(step: Step) -> list[Slot]:
    kinds = (SlotKind.PARAMETER, SlotKind.BUFFER)
    return [slot for slot in step.claim.slots if slot.kind in kinds]


def _is_mine(slot: Slot) -> bool:
    if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
        return makes(type(slot.owner), slot.name)
    return is_recipe_state(slot)


def _is_weight(slot: Slot) -> bool:
    return slot.kind is SlotKind.PARAMETER and slot.name.startswith("weight")


add_initializer(BasicOpInit(), BasicOperation)
add_refresher(FuserRefresher())

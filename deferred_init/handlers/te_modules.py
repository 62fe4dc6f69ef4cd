"""Initializers for Transformer Engine modules.

[Note: What TE's `reset_parameters` gets wrong]
It draws for all parameters of the module, also real ones, and replaces every
Parameter object, which loses `requires_grad`, attributes and hooks. So it runs on
loans: real parameters are replaced while it runs, and what it made is adopted by the
objects that everybody holds. It allocates on the current CUDA device, which
`execute.py` sets. The records of how each parameter is made are kept, see
`te/init_records.py`. Parameters that are quantized stay without memory until it comes
to them, so that only one at a time exists in high precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.attention.dot_product_attention import (
    DotProductAttention,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from deferred_init.aliases import dense_bytes, is_sharded
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer, has_user_rule
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.te.claims import claim_of_method
from deferred_init.te.grouped import (
    adopt_or_merge,
    is_grouped,
    lend_scratch,
    split_early_bias,
)
from deferred_init.te.high_precision import (
    lent_high_precision,
    set_aside_quantized,
    shares_buffer,
)
from deferred_init.te.init_records import (
    KeptInitRecords,
    has_record,
    init_context,
    is_of_te,
    record_of,
)
from deferred_init.te.probe import is_quantized
from deferred_init.te.quantization import Choice, choose, whole_bytes
from deferred_init.te.recipe_state import (
    is_recipe_state,
    is_stale,
    own_recipe_of_module,
    set_up_module,
)
from deferred_init.te.rng_trackers import restore_on_undo
from deferred_init.te.sharded import MODEL_PARALLEL_ATTRIBUTES, adopt_part

__all__ = ["TEModuleInit"]


class TEModuleInit:
    """Runs `reset_parameters` of a TE module, for its deferred parameters only."""

    name = "te.modules"
    composite = False
    makes_representation = True
    """Quantized storage and tensor-parallel attributes, also of loaded values."""
    runs_reset_parameters = True
    """Also where a subclass overrides it."""

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim parameters, empty placeholders, and recipe state without memory."""
        module: Any = site.module
        if isinstance(module, DotProductAttention):  # its constructor never calls it
            return None
        made = tuple(slot for slot in pending if _is_mine(slot))
        if not made and has_user_rule(type(module)):
            return None
        choice = _choice(site, request)
        late = [s for s in made if _is_weight(s)] if choice.quantized else []
        return claim_of_method(
            site,
            made,
            choice,
            request,
            method="reset_parameters",
            quantized=late,
            scratch_bytes=_scratch_bytes(choice, late) if late else 0,
            problems=_split_problem(site, choice),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run the module's own method on loans, then adopt what it made."""
        module: Any = step.site.module
        choice = _choice(step.site, workspace.request)
        claim = step.claim
        restore_on_undo(module, workspace)
        state = vars(module)["fp8_meta"]
        stale = is_stale(state, claim.slots, workspace.request.device)
        set_up_module(module, choice, stale=stale)
        if is_grouped(module):
            with choice.grad_mode():
                _run_grouped(step, workspace, quantized=choice.quantized)
            return
        if not choice.quantized and _is_dense(step):
            with (
                workspace.filling(step),
                KeptInitRecords(module),
                init_context(module),
                torch.no_grad(),  # at the end, as it asks function modes as well
            ):
                module.reset_parameters()
                _prefer_all_carried(claim.slots)
            return
        _run_quantized(step, workspace, choice)


def _run_quantized(step: Step, workspace: Workspace, choice: Choice) -> None:
    """Run a module's own method where it quantizes, or holds what is quantized."""
    module: Any = step.site.module
    claim = step.claim
    late = [s for s in claim.slots if choice.quantized and _is_weight(s)]
    early = [s for s in claim.slots if s not in late and not is_recipe_state(s)]
    loaded = [
        slot
        for slot in step.site.slots
        if slot.kind is SlotKind.PARAMETER
        and slot not in claim.slots
        and (_holds_quantized(slot) or (choice.quantized and _is_weight(slot)))
    ]
    # As rewrites they get no memory from `filling`. What is sharded is lent in full
    # size in any case, and thrown away as it is not claimed.
    whole = [slot for slot in late if not is_sharded(slot.tensor)]
    inner = Claim(slots=tuple(early), rewrites=(*whole, *loaded))
    request = workspace.request
    lent = lent_high_precision(
        module, whole, choice.te_recipe, request.device, request.rng
    )
    with (
        workspace.filling(step.with_claim(inner)),
        KeptInitRecords(module),
        set_aside_quantized(loaded),
        init_context(module),
        choice.grad_mode(),
        lent as buffer,
    ):
        module.reset_parameters()
        _prefer_all_carried(early)
        for slot in late:
            _adopt_made(slot, workspace, buffer)


def _adopt_made(slot: Slot, workspace: Workspace, buffer: Tensor | None = None) -> None:
    """Adopt what TE put into a slot; methods bound to it move along.

    Args:
        slot: Whose tensor TE made.
        workspace: Adopts it.
        buffer: What was lent to it, in which it must not stay.

    Raises:
        RuntimeError: TE left the slot without memory of its own.
    """
    found = slot.read()
    if found is None or found.is_meta or shares_buffer(found, buffer):
        raise RuntimeError(f"TE's own code left `{slot.name}` without memory")
    _prefer_carried(slot, found)
    if is_sharded(slot.tensor):
        adopt_part(slot, found, workspace)
        slot.write(slot.tensor)
        return
    workspace.adopt(slot, found)
    home = slot.tensor
    for name, value in list(home.__dict__.items()):
        if isinstance(value, MethodType) and value.__self__ is found:
            home.__dict__[name] = MethodType(value.__func__, home)
    if not home.is_meta:  # else it could not be kept, and the workspace replaced it
        slot.write(home)


def _run_grouped(step: Step, workspace: Workspace, *, quantized: bool) -> None:
    """Run a layer that joins its parameters; see the note in `te/grouped.py`."""
    module: Any = step.site.module
    slots = [s for s in step.claim.slots if s.kind is SlotKind.PARAMETER]
    workspace.allocate([s for s in step.claim.slots if s.tensor.numel() == 0])
    split_early_bias(module)
    if not quantized:
        lend_scratch(module, workspace.request.device)
    with KeptInitRecords(module):
        module.reset_parameters()
    adopt_or_merge(module, slots, workspace)


def _choice(site: ModuleSite, request: Request) -> Choice:
    module: Any = site.module
    return choose(
        site.fqn,
        request,
        built=bool(module.primary_weights_in_fp8),
        own_recipe=own_recipe_of_module(module),
        keeps=bool(getattr(module, "preserve_high_precision_init_val", False)),
    )


def _scratch_bytes(choice: Choice, late: list[Slot]) -> int:
    """Bytes beside the final tensors while a module's weights are quantized.

    One weight at a time exists in high precision; what is sharded, in full and
    quantized until the module is done.
    """
    sharded = [slot for slot in late if is_sharded(slot.tensor)]
    others = [slot.tensor for slot in late if slot not in sharded]
    high = max((dense_bytes(each) for each in others), default=0)
    return high + whole_bytes(choice, [slot.tensor for slot in sharded])


def _is_mine(slot: Slot) -> bool:
    if slot.kind is SlotKind.PARAMETER:
        if is_grouped(slot.owner):
            return is_of_te(slot.owner, slot.name)
        return has_record(slot.owner, slot.name)
    return slot.kind is SlotKind.ATTRIBUTE and (
        slot.tensor.numel() == 0 or is_recipe_state(slot)
    )


def _holds_quantized(slot: Slot) -> bool:
    return is_quantized(getattr(slot.tensor, "_local_tensor", slot.tensor))


def _is_weight(slot: Slot) -> bool:
    """Whether a slot is a parameter that TE quantizes."""
    owner: Any = slot.owner
    meta = record_of(owner, slot.name)
    return (
        slot.kind is SlotKind.PARAMETER
        and meta is not None
        and meta.fp8_meta_index is not None
    )


def _is_dense(step: Step) -> bool:
    """Whether a step makes ordinary parameters, of a module with no others."""
    return not any(map(is_recipe_state, step.claim.slots)) and not any(
        is_quantized(slot.tensor) for slot in step.site.slots
    )


def _split_problem(site: ModuleSite, choice: Choice) -> tuple[str, ...]:
    num_parts = len(getattr(site.module, "weight_names", ()))
    if not choice.quantized or num_parts < 2:
        return ()
    return (
        f"{site.describe()} splits its weight into {num_parts} parameters, which "
        "Transformer Engine cannot store quantized: build it with fused parameters "
        "(`fuse_qkv_params=True`), or name it in `high_precision_modules`",
    )


def _prefer_all_carried(slots: Iterable[Slot]) -> None:
    for slot in slots:
        if slot.tensor.__dict__:
            _prefer_carried(slot, slot.read())


def _prefer_carried(slot: Slot, made: Tensor | None) -> None:
    """Let attributes set by the user since construction win over TE's defaults."""
    if made is None or made is slot.tensor:
        return
    for name in MODEL_PARALLEL_ATTRIBUTES:
        if name in slot.tensor.__dict__:
            made.__dict__.pop(name, None)


add_initializer(TEModuleInit(), TransformerEngineBaseModule)

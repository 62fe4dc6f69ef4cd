"""Grouped linear layers that keep all experts' weights in one Parameter.

[Note: When the number of parameters changes]
With `single_grouped_weight` or `single_grouped_bias` a layer on meta has `weight0`,
`weight1`, ..., and the same layer with memory has one `weight`. No swap can express
that, so whoever held one of the old parameters is made to hold the new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deferred_init.aliases import is_sharded
from deferred_init.handlers.protocol import Workspace
from deferred_init.slots import ModuleSite, Slot, SlotKind

__all__ = ["adopt_or_merge", "is_grouped", "joined_problems", "joined_slots"]
__all__ += ["lend_scratch", "split_early_bias"]


def is_grouped(module: Any) -> bool:
    """Whether a layer joins its parameters when they get memory."""
    held = vars(module)  # `getattr` of what is not there takes its time
    return bool(held.get("single_grouped_weight") or held.get("single_grouped_bias"))


def joined_slots(module: Any, slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the parameters that become parts of one, of those that are given."""
    if not is_grouped(module):
        return ()
    kinds = [
        kind
        for kind in ("weight", "bias")
        if getattr(module, f"single_grouped_{kind}", False)
    ]
    return tuple(
        slot
        for slot in slots
        if any(re.fullmatch(rf"{kind}\d+", slot.name) for kind in kinds)
    )


def joined_problems(
    site: ModuleSite, pending: Sequence[Slot], label: str
) -> tuple[str, ...]:
    """Say why the parameters of a layer cannot become one; empty if they can."""
    if not is_grouped(site.module):
        return ()
    if any(is_sharded(slot.tensor) for slot in pending):
        return (
            f"{label} joins its parameters into one when they get memory, but they are "
            "sharded one by one already: materialize the model first, or build the "
            "layer with `single_grouped_weight=False, single_grouped_bias=False`",
        )
    params = [slot for slot in site.slots if slot.kind is SlotKind.PARAMETER]
    real = [slot.name for slot in params if slot not in pending]
    if real and len(real) < len(params):
        return (
            f"{label} joins its parameters into one, but {len(real)} of them "
            f"({real[0]}, ...) have values already: load all of them, or none",
        )
    joined = joined_slots(site.module, pending)
    texts = (
        _frozen_in_part([slot for slot in joined if slot.name.startswith(kind)])
        for kind in ("weight", "bias")
    )
    return tuple(f"{label} joins {text}" for text in texts if text)


def _frozen_in_part(slots: Sequence[Slot]) -> str:
    frozen = [slot.name for slot in slots if not slot.tensor.requires_grad]
    if not 0 < len(frozen) < len(slots):
        return ""
    names = ", ".join(frozen[:10])
    return (
        f"{len(slots)} parameters into one `{slots[0].name.rstrip('0123456789')}`, but "
        f"{len(frozen)} of them are frozen ({names}) and the others are not: freeze "
        "all of them, or none"
    )


def split_early_bias(module: Any) -> None:
    """Undo what `te.GroupedLinear` does too early on meta.

    With a single grouped bias, but not weight, its constructor joins the biases on
    meta already, and its `reset_parameters` then fails to find them.
    """
    params = module._parameters
    count = getattr(module, "num_gemms", 0)
    joined = params.get("bias")
    if joined is None or not count or params.get("bias0") is not None:
        return
    for index in range(count):
        bias = torch.empty(module.out_features, dtype=joined.dtype, device="meta")
        params[f"bias{index}"] = nn.Parameter(bias)
    del params["bias"]


def lend_scratch(module: nn.Module, device: torch.device) -> None:
    """Put memory in place of every parameter of a module that has none."""
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            memory = torch.empty(param.shape, dtype=param.dtype, device=device)
            module._parameters[name] = nn.Parameter(memory)


def adopt_or_merge(
    module: nn.Module, slots: Sequence[Slot], workspace: Workspace
) -> None:
    """Adopt what kept its name, and merge what was joined.

    Raises:
        RuntimeError: Something without memory was left, or nothing stands for a slot.
    """
    for kind in ("weight", "bias"):
        own = [slot for slot in slots if slot.name.startswith(kind)]
        gone = [s for s in own if module._parameters.get(s.name) is None]
        for slot in own:
            if slot not in gone:
                workspace.adopt(slot, _made(module, slot.name))
                if not slot.tensor.is_meta:
                    slot.write(slot.tensor)
        if not gone:
            continue
        joined = _made(module, kind)
        joined.requires_grad_(gone[0].tensor.requires_grad)  # of all, by the plan
        for name, value in gone[0].tensor.__dict__.items():
            joined.__dict__.setdefault(name, value)
        workspace.rebind(gone, joined)


def _made(module: nn.Module, name: str) -> nn.Parameter:
    found = module._parameters.get(name)
    if found is None or found.is_meta:
        raise RuntimeError(f"TE's own code left `{name}` without memory")
    return found

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

from deferred_init.handlers.protocol import Workspace
from deferred_init.slots import Slot

__all__ = ["adopt_or_merge", "is_grouped", "joined_in_parts"]
__all__ += ["joined_slots", "lend_scratch", "split_early_bias"]


def is_grouped(module: Any) -> bool:
    """Whether a layer joins its parameters when they get memory."""
    return bool(
        getattr(module, "single_grouped_weight", False)
        or getattr(module, "single_grouped_bias", False)
    )


def joined_slots(module: Any, slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the parameters that become parts of one, of those that are given."""
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


def joined_in_parts(label: str) -> str:
    """Say that parameters which are sharded one by one cannot become one."""
    return (
        f"{label} joins its parameters into one when they get memory, but they are "
        "sharded one by one already: materialize the model first, or build the layer "
        "with `single_grouped_weight=False, single_grouped_bias=False`"
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
        frozen = [slot for slot in gone if not slot.tensor.requires_grad]
        if frozen and len(frozen) < len(gone):
            names = ", ".join(slot.name for slot in frozen)
            raise RuntimeError(
                f"{names} are frozen and the others are not, but all of them become "
                f"one parameter `{kind}`"
            )
        joined.requires_grad_(not frozen)
        for name, value in gone[0].tensor.__dict__.items():
            joined.__dict__.setdefault(name, value)
        workspace.rebind(gone, joined)


def _made(module: nn.Module, name: str) -> nn.Parameter:
    found = module._parameters.get(name)
    if found is None or found.is_meta:
        raise RuntimeError(f"TE's own code left `{name}` without memory")
    return found

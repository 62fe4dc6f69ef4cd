"""Memory for the values that weights have before they are quantized.

[Note: One buffer for the weights of a module]
Transformer Engine's `reset_parameters` draws a weight in high precision, quantizes it,
and goes on to the next. What it finds without memory it allocates by
`torch.empty_like(param, device="cuda")`, which for a tensor on meta runs through the
Python decompositions of torch and takes 0.12 ms of a CPU, longer than all the rest. So
the weights are lent one buffer, which each has to itself for as long as it needs it:
the peak stays that of the largest weight. Only where TE's own method runs with init
functions that keep nothing; others get memory from TE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.slots import Slot
from deferred_init.te.init_records import only_known_init_functions

__all__ = ["lent_high_precision", "set_aside_quantized", "shares_buffer"]


@contextmanager
def lent_high_precision(
    module: Any,
    weights: Sequence[Slot],
    te_recipe: Any,
    device: torch.device,
    policy: str = "eager",
) -> Iterator[Tensor | None]:
    """Lend the weights of a module memory in which TE draws them.

    Args:
        module: A TE module whose `reset_parameters` the body calls.
        weights: Its parameters on meta that are going to be quantized.
        te_recipe: The recipe by which they are.
        device: Where.
        policy: The RNG policy. `"fast"` fills whole memories only, so that weights of
            several sizes get theirs from TE: else the generator of the smaller ones
            would depend on what else is deferred.

    Yields:
        The buffer, or None if none was lent. Where it is still in a slot, or shared
        by what stands there, TE did not quantize the weight.
    """
    sizes = {slot.tensor.numel() for slot in weights}
    in_parts = policy == "fast" and len(sizes) > 1
    if in_parts or not _can_share(module, weights, te_recipe):
        yield None
        return
    buffer = torch.empty(max(sizes), dtype=weights[0].tensor.dtype, device=device)
    lent = []
    for slot in weights:
        part = buffer.as_strided(slot.tensor.size(), slot.tensor.stride())
        lent.append(nn.Parameter(part, requires_grad=False))
        slot.write(lent[-1])
    try:
        yield buffer
    finally:
        for slot, part in zip(weights, lent, strict=True):
            if slot.read() is part:
                slot.write(slot.tensor)


def shares_buffer(made: Tensor, buffer: Tensor | None) -> bool:
    """Whether what was made is still in the memory that was lent."""
    return buffer is not None and storage_key(made) == storage_key(buffer)


@contextmanager
def set_aside_quantized(loaded: Sequence[Slot]) -> Iterator[None]:
    """Lend TE parameters without memory in place of real quantized ones."""
    kept = [(slot, slot.read()) for slot in loaded]
    for slot, original in kept:
        shape, dtype = original.shape, original.dtype
        slot.write(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    try:
        yield
    finally:
        for slot, original in kept:
            slot.write(original)


def _can_share(module: Any, weights: Sequence[Slot], te_recipe: Any) -> bool:
    own_method = type(module).reset_parameters.__module__
    is_custom = getattr(te_recipe, "custom", None)
    return (
        len(weights) > 0
        and own_method.startswith("transformer_engine.")
        and not (callable(is_custom) and is_custom())
        and only_known_init_functions(module)
        and len({slot.tensor.dtype for slot in weights}) == 1
        and all(
            type(slot.tensor) is nn.Parameter
            and slot.tensor.is_meta
            and slot.tensor.is_contiguous()
            for slot in weights
        )
    )

"""What the initializers of TE's modules and of its ops claim alike."""

from __future__ import annotations

from collections.abc import Sequence

from deferred_init.handlers.protocol import Claim, Request
from deferred_init.slots import ModuleSite, Slot
from deferred_init.te.grouped import joined_problems, joined_slots
from deferred_init.te.quantization import Choice, problems_with, stored_as
from deferred_init.te.rng_trackers import parts_drawn_alike

__all__ = ["claim_of_method"]


def claim_of_method(
    site: ModuleSite,
    made: tuple[Slot, ...],
    choice: Choice,
    request: Request,
    *,
    method: str,
    quantized: Sequence[Slot],
    scratch_bytes: int,
    problems: Sequence[str] = (),
) -> Claim:
    """Return the claim of slots that one of TE's own methods makes.

    Args:
        site: The module or op.
        made: Its slots that the method makes.
        choice: What becomes of its weights.
        request: What the caller asked for.
        method: Name of the method.
        quantized: Of the slots, those whose tensors are stored quantized.
        scratch_bytes: Bytes beside the final tensors while the method runs.
        problems: Why it cannot run, beside what modules and ops have in common.
    """
    label = site.describe()
    weights = [slot.tensor for slot in quantized]
    return Claim(
        slots=made,
        assumptions=parts_drawn_alike(site.module, label, request.rng) if made else (),
        source=f"{type(site.module).__name__}.{method}",
        problems=(
            *problems_with(choice, label, request, weights),
            *problems,
            *joined_problems(site, made, label),
        ),
        scratch_bytes=scratch_bytes,
        stored=stored_as(choice, quantized),
        joined=joined_slots(site.module, made),
    )

"""What the planner and the initializers exchange: a request, claims, steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deferred_init.representation import Representation
from deferred_init.slots import ModuleSite, Slot
from deferred_init.small_values import small_value

if TYPE_CHECKING:
    from deferred_init.handlers.protocol import Initializer

__all__ = ["LAST", "Claim", "Order", "Request", "Step"]

T = TypeVar("T")
Order = tuple[int, int]
LAST: Order = (2**62, 0)
"""Sorts after everything, whether its place is known or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for, as far as handlers need it.

    Attributes:
        device: The target, with an index for CUDA.
        recipe: The resolved `Recipe`, or None.
        dtype: Overrides the dtype of floating-point tensors, or None.
        rng: Name of the RNG policy: `"eager"`, `"by_name"` or `"fast"`.
        verify: `"fast"` or `"full"`.
        seed: The seed, or None to go on with the generators as they are.
        values_from: `"cpu"` to replay recordings on the CPU whatever the target;
            None replays them on the target.
        broadcast_from: The rank that hands its real values to the others, or None.
        rank_timeout_s: How long ranks wait for each other.
        draws_unneeded: Whether random numbers are drawn also for values that nobody
            needs, to stay with eager's stream; not if a checkpoint has every
            parameter.
        roots: The models of the call, set while the plan is made; for what is a copy
            of another module.
        compute_capability: Of the GPU that is planned for, which need not be here;
            None asks the device.
    """

    device: torch.device
    recipe: Any = None
    dtype: torch.dtype | None = None
    rng: str = "eager"
    verify: str = "fast"
    seed: int | None = None
    values_from: str | None = None
    broadcast_from: int | None = None
    rank_timeout_s: float = 300.0
    draws_unneeded: bool = True
    roots: tuple[ModuleSite, ...] = ()
    compute_capability: tuple[int, int] | None = None
    _made: dict[Hashable, Any] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Make something that all modules share, when it is first needed."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found


@small_value
class Claim:
    """What an initializer takes upon itself for one module.

    Attributes:
        slots: Deferred slots that it makes; a subset of the offered ones.
        rewrites: Deferred slots made by others, usually of descendants, that it
            writes again, as `nn.Transformer` does at the end of its constructor.
        source: Where the values come from, for reports: `Linear.reset_parameters`.
        assumptions: What had to be assumed about the order or the values.
        problems: Why it cannot be done after all; each becomes part of the one
            `PlanError`. A claim with problems is never run.
        scratch_bytes: Extra bytes on the device while it runs.
        order: Sort key for claims that know their place in construction order
            (recordings); None keeps the order of the walk, after those.
        settled: Nobody but initializers registered to come last may write these
            slots again, or is asked about modules that have no others.
        stored: Those of the slots that are stored quantized, and how.
        joined: Those of the slots that become parts of another Parameter.
        num_writes: How often it writes to each tensor, by `id`, as torch counts them;
            None if that is not known.
    """

    slots: tuple[Slot, ...] = ()
    rewrites: tuple[Slot, ...] = ()
    source: str = ""
    assumptions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    scratch_bytes: int = 0
    order: Order | None = None
    settled: bool = False
    stored: tuple[tuple[Slot, Representation], ...] = ()
    joined: tuple[Slot, ...] = ()
    num_writes: Mapping[int, int] | None = None

    def leaves(self, slots: Iterable[Slot]) -> list[Slot]:
        """Return those of the slots that code would write, which the claim must not.

        What a recording makes has seen all that its constructors did, and is taken out
        of the claims of others: their code must not reach it when it runs.
        """
        claimed = {slot.tensor_id for slot in (*self.slots, *self.rewrites)}
        return [slot for slot in slots if slot.tensor_id not in claimed]


@small_value
class Step:
    """One claim with its place in the plan.

    Attributes:
        index: Position in the plan.
        site: The module and its slots.
        initializer: Who runs it.
        claim: What it makes and writes.
        num_bytes: Bytes of the tensors that it makes, on the device, when final.
        order: Its place in construction order, where that is known.
    """

    index: int
    site: ModuleSite
    initializer: Initializer
    claim: Claim
    num_bytes: int
    order: Order | None = None

    def with_claim(self, claim: Claim) -> Step:
        """Return this step with another claim."""
        return Step(
            index=self.index,
            site=self.site,
            initializer=self.initializer,
            claim=claim,
            num_bytes=self.num_bytes,
            order=self.order,
        )

"""Initializer for what a checkpoint has; one is made for each call with `weights=`.

[Note: Weights and initializers]
The law is eager construction followed by `load_state_dict`: what the checkpoint has is
loaded, what it lacks keeps the value of its initializer. Two ways lead there.

If the checkpoint has every parameter, nobody needs random numbers: what is loaded is
claimed before anybody else is asked, and ordinary initializers make only the rest
(buffers that are not saved), with scratch lent for what is not theirs.

If it lacks a parameter and the RNG policy is `eager`, that parameter's value depends on
everything drawn before it, and so does a buffer of which a recording knows that it is
random. So all initializers run as they would without weights, and
loading comes last. A module whose own hook has to run (quantized weights are made by
it) is treated so in any case.

Loading comes last in both, so that nothing that is loaded can be written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from deferred_init.aliases import dense_bytes, is_sharded
from deferred_init.errors import listing
from deferred_init.handlers.protocol import (
    Claim,
    Order,
    Request,
    Step,
    Workspace,
)
from deferred_init.handlers.registry import initializers_for
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.loading.matching import Load, Matches, WeightsRequest, match_weights
from deferred_init.loading.rest import rest_is_random
from deferred_init.loading.session import STEPS_AT_ONCE, LoadingSession
from deferred_init.loading.targets import find_targets
from deferred_init.slots import Inventory, ModuleSite, Slot
from deferred_init.sources.protocol import TensorInfo

__all__ = ["CheckpointInitializer"]

_STEP_BYTES = 1 << 28
_ORDER = 2**62
"""With the number of the step: after everything else, recipe rules included."""


class CheckpointInitializer:
    """Fills tensors from a source of weights.

    Args:
        inventory: The model's slots.
        request: What the caller asked for.
        weights: What the caller asked for about weights.
        options: Threads and buffers.

    Attributes:
        matches: What is loaded, what is missing, problems and notes.
        draws_all: Whether everything has to be initialized as without weights.
    """

    name = "checkpoint"
    composite = False

    def __init__(
        self,
        inventory: Inventory,
        request: Request,
        weights: WeightsRequest,
        options: EngineOptions | None = None,
    ) -> None:
        self._inventory = inventory
        self._weights = weights
        self._options = options or EngineOptions()
        self.matches: Matches = match_weights(weights, find_targets(inventory, request))
        loaded = {load.target.slot.tensor_id for load in self.matches.loads}
        rest = [slot for slot in inventory.deferred if slot.tensor_id not in loaded]
        self.draws_all = request.rng == "eager" and rest_is_random(rest)
        self._loads: dict[int, list[Load]] = {}

    def reserved(self) -> set[int]:
        """Return by `id` the tensors that nobody else writes; see the note."""
        if self.draws_all:
            return set()
        tensors = (load.target.slot.tensor for load in self.matches.loads)
        return {
            id(tensor)
            for tensor in tensors
            if not any(
                getattr(initializer, "makes_representation", False)
                for slot in self._inventory.slots_of(tensor)
                for initializer in initializers_for(type(slot.owner))
            )
        }

    def claims(self, made: Sequence[Claim]) -> Iterator[tuple[ModuleSite, Claim]]:
        """Return the claims, in the order of the files; steps of bounded size.

        Args:
            made: What others claimed: values of tensors that are stored quantized
                come in high precision first; what becomes part of another Parameter,
                or quantized shards, cannot be loaded.
        """
        quantized = {slot.tensor_id for claim in made for slot, _ in claim.stored}
        joined = {slot.tensor_id for claim in made for slot in claim.joined}
        infos = self._weights.source.tensors
        for number, loads in enumerate(_groups(self.matches.loads, infos), start=1):
            order: Order = (_ORDER, number)
            self._loads[number] = loads
            claim = Claim(
                slots=tuple(load.target.slot for load in loads),
                source=f"weights: {self._weights.source.name}",
                scratch_bytes=STEPS_AT_ONCE * _scratch_bytes(loads, quantized),
                order=order,
                settled=True,
                problems=(
                    *_problems_with_joined(loads, joined),
                    *_problems_with_shards(loads, quantized),
                ),
            )
            yield self._inventory.roots[0], claim

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim nothing: `claims` says it all at once."""
        return None

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run one step alone; `session` is what an execution uses."""
        self.session([step], workspace).run(step)

    def session(self, steps: Sequence[Step], workspace: Workspace) -> LoadingSession:
        """Begin to load; reads ahead from one step to the next."""
        numbers = [step.order[1] for step in steps if step.order is not None]
        return LoadingSession(
            self._inventory,
            workspace,
            self._weights.source,
            [self._loads[number] for number in numbers],
            self._options,
        )


def _problems_with_joined(loads: Sequence[Load], joined: Set[int]) -> tuple[str, ...]:
    names = [load.target.name for load in loads if load.target.slot.tensor_id in joined]
    if not names:
        return ()
    return (
        f"{len(names)} tensors become part of one Parameter, into which nothing can be "
        f"loaded: {listing(names)}. Build the layer with single_grouped_weight=False "
        "and single_grouped_bias=False, or load these after `materialize` with "
        "`load_state_dict`",
    )


def _problems_with_shards(
    loads: Sequence[Load], quantized: Set[int]
) -> tuple[str, ...]:
    targets = [load.target for load in loads if load.target.slot.tensor_id in quantized]
    names = [each.name for each in targets if is_sharded(each.slot.tensor)]
    if not names:
        return ()
    # Their scale is that of the whole, which a rank that loads its part does not see.
    return (
        f"{len(names)} tensors are stored quantized and are sharded already, so that "
        f"no values can be loaded into them: {listing(names)}. Load the weights before "
        "`fully_shard`, after `materialize` with `torch.distributed.checkpoint`, or "
        "with a recipe that keeps weights in high precision",
    )


def _scratch_bytes(loads: Sequence[Load], quantized: Set[int]) -> int:
    tensors = (load.target.slot.tensor for load in loads)
    return sum(dense_bytes(t) for t in tensors if id(t) in quantized)


def _groups(
    loads: Sequence[Load], infos: Mapping[str, TensorInfo]
) -> Iterator[list[Load]]:
    """Divide loads into steps by file and offset, or as they come."""
    files: dict[int, int] = {}

    def place(load: Load) -> tuple[int, int]:
        extent = infos[load.pieces[0].key].extent
        if extent is None:
            return -1, 0
        return files.setdefault(id(extent.file), len(files)), extent.offset

    group: list[Load] = []
    size = 0
    for load in sorted(loads, key=place):
        group.append(load)
        tensor = load.target.slot.tensor
        size += tensor.numel() * load.target.dtype.itemsize
        if size >= _STEP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group

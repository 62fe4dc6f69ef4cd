"""Reads that are shared by the ranks of a node: one rank reads, the others receive.

[Note: One reader per node]
Problem: replicas need the same bytes, and ranks that keep other columns need the same
rows. From the page cache that costs little; from a store or a file system in the
network every byte is fetched as often as there are ranks.

Naive attempt: rank 0 reads everything and broadcasts it. Its link is the limit while
those of the others are idle, and if it fails to read, all others hang in a collective.

Design: only tensors of which several ranks of the node need the same rows are shared.
Each has one reader, the rank with the fewest bytes so far; a broadcast hands over the
rows in the model's dtype, and every rank keeps its part. All ranks go through the same
list in the same order: they share only if a digest of it is equal. Before the
broadcasts of a step they meet at the job's key-value store, where a rank that failed
says so; nobody enters a collective to which another one will not come.

Shortcoming: where ranks keep columns, the rows pass through scratch memory on every
rank, for up to three steps at once.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from deferred_init.aliases import is_sharded
from deferred_init.distributed.members import sharing_ranks
from deferred_init.distributed.rendezvous import Meeting, RanksFailed, RanksMissing
from deferred_init.distributed.slicing import Region, copy_region
from deferred_init.handlers.protocol import Request
from deferred_init.loading.boxes import Segments
from deferred_init.loading.destinations import Destination
from deferred_init.loading.matching import Load
from deferred_init.slots import Inventory

__all__ = ["Sharing", "sharing_for"]

_ABOUT = "the reads of `materialize`"
_LEAST_BYTES = 1 << 16
"""Reading less costs no more than a broadcast."""

Rows = tuple[int, int]
Steps = Sequence[Sequence[Load]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Who reads which rows of a tensor."""

    reader: int
    rows: Rows


def sharing_for(inventory: Inventory, request: Request, steps: Steps) -> Sharing | None:
    """Agree with the other ranks on what one reads for all; every rank calls this.

    Args:
        inventory: The model's slots.
        request: What the caller asked for.
        steps: What will be loaded.

    Returns:
        None if there is nothing to share, or nobody to share it with.
    """
    everybody = sharing_ranks(inventory, request)
    if not everybody:
        return None
    meeting = Meeting(everybody, request.rank_timeout_s, _ABOUT)
    about = (socket.gethostname(), _digest(inventory, request, steps))
    ranks = meeting.decide(about, _neighbours)[dist.get_rank()]
    shared = _shared(inventory, ranks, steps) if len(ranks) > 1 else {}
    if not shared:
        return None
    return Sharing(ranks, everybody, request.rank_timeout_s, shared)


class Sharing:
    """What is shared, and the way it takes from the reader to the others.

    Args:
        ranks: The ranks that share, this one among them.
        everybody: All ranks of the model.
        timeout_s: How long to wait for the others.
        shared: What is shared, by the load's `id`.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        everybody: tuple[int, ...],
        timeout_s: float,
        shared: Mapping[int, _Shared],
    ) -> None:
        self._rank = dist.get_rank()
        self._shared = shared
        self._apart = ranks != everybody
        self._meeting = Meeting(ranks, timeout_s, _ABOUT)
        self._group: Any = None
        if ranks != tuple(range(dist.get_world_size())):
            self._group = dist.new_group(list(ranks), use_local_synchronization=True)
        self.bytes_received = 0

    def is_shared(self, load: Load) -> bool:
        """Whether one rank reads a tensor for several."""
        return id(load) in self._shared

    def reads(self, destination: Destination) -> bool:
        """Whether this rank reads what goes there."""
        return destination.reader in (None, self._rank)

    def spread(self, load: Load, destination: Destination) -> Destination:
        """Return where the rows that all need are put, and by whom they are read."""
        shared = self._shared.get(id(load))
        if shared is None:
            return destination
        low, high = shared.rows
        memory, own = destination.memory, destination.region
        box: list[Segments] = [((0, length),) for length in load.target.shape]
        if own is None:
            own = list(box)
        box[0] = ((low, high),)
        if list(own) == box and memory.is_contiguous():
            return replace(destination, reader=shared.reader)
        shape = (high - low, *load.target.shape[1:])
        scratch = torch.empty(shape, dtype=memory.dtype, device=memory.device)
        rows = tuple((start - low, stop - low) for start, stop in own[0])
        kept = Region(dims=(rows, *own[1:]))

        def keep() -> None:
            copy_region(memory, scratch, kept)
            if destination.done is not None:
                destination.done()

        return Destination(memory=scratch, region=box, done=keep, reader=shared.reader)

    def exchange(self, destinations: Iterable[Destination]) -> None:
        """Send what this rank read and receive the rest.

        Raises:
            RanksFailed: Another rank failed; all ranks of the model know.
            OSError: Another rank of this node failed.
        """
        waiting = [each for each in destinations if each.reader is not None]
        if not waiting:
            return
        self._meet()
        for destination in waiting:
            flat = destination.memory.view(-1).view(torch.uint8)
            dist.broadcast(flat, src=destination.reader, group=self._group)
            if destination.reader != self._rank:
                self.bytes_received += flat.numel()

    def finish(self) -> None:
        """Hear if another rank failed after its last exchange, and end."""
        if self._apart:
            self._meet()
        self.close()

    def fail(self, error: BaseException) -> None:
        """Tell the ranks of this node that this one failed, and end.

        Those of the whole model are told by whoever runs the plan.
        """
        known = isinstance(error, (RanksFailed, RanksMissing, _ToldHere))
        if self._apart and not known:
            self._meeting.fail(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Let go of the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _meet(self) -> None:
        try:
            self._meeting.decide(None, _nothing)
        except (RanksFailed, RanksMissing) as error:
            if self._apart:  # so that the rest of the model is told as well
                raise _ToldHere(str(error)) from error
            raise


class _ToldHere(OSError):
    """A rank of this node failed, which the ranks of other nodes do not know."""


def _nothing(answers: Mapping[int, Any]) -> None:
    """Judge nothing: whoever failed has said so."""


def _neighbours(answers: Mapping[int, tuple[str, str]]) -> dict[int, tuple[int, ...]]:
    """Return by rank the ranks of the same node that load the same."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, about in answers.items():
        alike.setdefault(about, []).append(rank)
    return {rank: tuple(sorted(alike[about])) for rank, about in answers.items()}


def _digest(inventory: Inventory, request: Request, steps: Steps) -> str:
    """Spell what has to be equal on ranks that share, in a few bytes."""
    digest = hashlib.sha256()
    backends = dist.get_backend_config()
    if f"{request.device.type}:" not in backends:  # nothing could be sent
        digest.update(str(dist.get_rank()).encode())
    for loads in steps:
        for load in loads:
            tensor = load.target.slot.tensor
            spec = (getattr(tensor, "device_mesh", None), _placements(tensor))
            alone = not inventory.groups[id(tensor)].shared
            about = (load.target.name, load.target.shape, load.target.dtype, alone)
            digest.update(repr((*about, spec, load.pieces)).encode())
        digest.update(b"|")
    return digest.hexdigest()


def _placements(tensor: Any) -> tuple[str, ...]:
    return tuple(map(repr, getattr(tensor, "placements", ())))


def _shared(
    inventory: Inventory, ranks: Sequence[int], steps: Steps
) -> dict[int, _Shared]:
    """Choose what is shared, and a reader for each; the same on all ranks."""
    burden = dict.fromkeys(ranks, 0)
    found: dict[int, _Shared] = {}
    for load in (load for loads in steps for load in loads):
        rows = _common_rows(inventory, ranks, load)
        if rows is not None:
            reader = min(ranks, key=lambda rank: burden[rank])
            low, high = rows
            burden[reader] += _num_bytes(load) * (high - low) // load.target.shape[0]
            found[id(load)] = _Shared(reader=reader, rows=rows)
    return found


def _num_bytes(load: Load) -> int:
    return load.target.slot.tensor.numel() * load.target.dtype.itemsize


def _common_rows(inventory: Inventory, ranks: Sequence[int], load: Load) -> Rows | None:
    """Return the rows to read for all, or None if each better reads its own."""
    from deferred_init.handlers.dtensor import rows_of_rank

    tensor, shape = load.target.slot.tensor, load.target.shape
    if (
        not shape
        or _num_bytes(load) < _LEAST_BYTES
        or inventory.groups[id(tensor)].shared
    ):
        return None
    kept: list[Segments | None] = [((0, shape[0]),) for _ in ranks]
    if is_sharded(tensor):
        kept = [rows_of_rank(tensor, rank) for rank in ranks]  # type: ignore[arg-type]
    if any(segments is None for segments in kept):  # a rank is not in its mesh
        return None
    ranges = [each for segments in kept if segments is not None for each in segments]
    low = min((start for start, _ in ranges), default=0)
    high = max((stop for _, stop in ranges), default=0)
    total = sum(stop - start for start, stop in ranges)
    return (low, high) if total > high - low else None

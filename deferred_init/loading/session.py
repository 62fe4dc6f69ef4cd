"""One execution of loading: makes memory, keeps the engine busy, waits for steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from deferred_init.handlers.protocol import Order, Step, Workspace
from deferred_init.loading.asked import Asked, asked_for
from deferred_init.loading.boxes import Cut, cut
from deferred_init.loading.destinations import Destination, Destinations
from deferred_init.loading.engine import Batch, Engine
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.loading.matching import Load
from deferred_init.loading.read_plan import Chunk, Landing, join, landings
from deferred_init.loading.sharing import Sharing, sharing_for
from deferred_init.loading.twins import check_twins
from deferred_init.record.paused import no_function_modes
from deferred_init.slots import Inventory
from deferred_init.sources.protocol import ByteFile, TensorInfo, TensorSource
from deferred_init.sources.shared import SharedReads

__all__ = ["STEPS_AT_ONCE", "LoadingSession"]

_log = logging.getLogger(__name__)

STEPS_AT_ONCE = 3
"""How many steps that need scratch are under way when one is waited for."""


class LoadingSession:
    """Loads the steps of one plan, reading ahead; implements `Session`.

    Args:
        inventory: The model's slots.
        workspace: What changes the model.
        source: Where the values come from.
        steps: What each step loads, in the planned order.
        options: Threads and buffers.
    """

    def __init__(
        self,
        inventory: Inventory,
        workspace: Workspace,
        source: TensorSource,
        steps: Sequence[Sequence[Load]],
        options: EngineOptions,
    ) -> None:
        self._workspace = workspace
        self._source = source
        self._infos: Mapping[str, TensorInfo] = source.tensors
        self._steps = steps
        self._options = options
        self._destinations = Destinations(inventory, workspace, source)
        self._engine: Engine | None = None
        self._begun: list[tuple[Batch, list[Destination]]] = []
        self._finished = 0
        self._inventory = inventory
        self._sharing: Sharing | None = None

    def advance(self, order: Order | None) -> None:
        """Do nothing: loading draws no random numbers."""

    def run(self, step: Step) -> None:
        """Load the next step; on any failure all reading stops before it is raised."""
        try:
            if self._engine is None:
                self._check_files()
                check_twins(self._source, self._steps)
                self._sharing = self._agree_to_share()
                self._engine = Engine(self._workspace.request.device, self._options)
                # A later step of somebody else may fail, or Ctrl-C come between two.
                self._workspace.on_undo(self._engine.close)
            self._run(self._engine)
        except BaseException as error:
            if self._engine is not None:
                self._engine.close()
            if self._sharing is not None:
                self._sharing.fail(error)
            raise

    def _agree_to_share(self) -> Sharing | None:
        """Find out what one rank reads for several, if the caller wants that."""
        if not isinstance(self._source, SharedReads):
            return None
        request = self._workspace.request
        sharing = sharing_for(self._inventory, request, self._steps)
        if sharing is not None:
            self._workspace.on_undo(sharing.close)
        return sharing

    def _run(self, engine: Engine) -> None:
        while len(self._begun) < len(self._steps) and self._has_room():
            with no_function_modes():  # nothing here needs a default device
                batch, made = self._begin(self._steps[len(self._begun)])
            engine.submit(batch)
            self._begun.append((batch, made))
        batch, made = self._begun[self._finished]
        engine.wait(batch)
        if self._sharing is not None:
            self._sharing.exchange(made)
        for destination in made:
            if destination.done is not None:
                destination.done()
        self._begun[self._finished] = (batch, [])  # lets go of scratch
        self._finished += 1
        if self._finished == len(self._steps):
            engine.close()
            engine.check()
            _log.debug("%s", engine.timeline)
            self._check_files()
            self._note()
            if self._sharing is not None:
                self._sharing.finish()

    def _has_room(self) -> bool:
        """Whether one more step may begin: readers should never wait for the next."""
        under_way = self._begun[self._finished :]
        with_scratch = sum(any(to.done for to in made) for _, made in under_way)
        return (
            len(under_way) < self._options.steps_ahead and with_scratch < STEPS_AT_ONCE
        )

    def _begin(self, loads: Sequence[Load]) -> tuple[Batch, list[Destination]]:
        """Make the memory of a step, and say what is read into it."""
        made: list[Destination] = []
        found: list[Landing] = []
        asked: list[Asked] = []
        for load in loads:
            destination = self._make(load)
            made.append(destination)
            if destination.in_place:
                continue
            if self._sharing is not None and not self._sharing.reads(destination):
                continue
            for key, part in _cuts(load, destination):
                if self._infos[key].extent is None or destination.in_order:
                    asked += asked_for(
                        self._source,
                        key,
                        part,
                        destination.memory,
                        self._options.asked_bytes,
                    )
                else:
                    found += landings(
                        key,
                        self._infos[key],
                        part,
                        destination.memory,
                        self._options.buffer_bytes,
                    )
        return Batch(chunks=self._chunks(found), asked=asked), made

    def _make(self, load: Load) -> Destination:
        """Make the memory of one tensor, or of the rows that the node reads of it."""
        if self._sharing is None or not self._sharing.is_shared(load):
            return self._destinations.make(load, self._infos)
        own = self._destinations.make(load, self._infos, may_stay=False)
        return self._sharing.spread(load, own)

    def _chunks(self, found: list[Landing]) -> list[Chunk]:
        """Join landings, except those that can be read straight into place."""
        if self._workspace.request.device.type != "cpu":
            return join(found, self._options.buffer_bytes)
        straight = [item for item in found if item.is_copy]
        others = [item for item in found if not item.is_copy]
        alone = [
            Chunk(
                file=item.file,
                offset=item.offset,
                num_bytes=item.num_bytes,
                landings=(item,),
            )
            for item in straight
        ]
        return [*alone, *join(others, self._options.buffer_bytes)]

    def _check_files(self) -> None:
        """See that the files are still those that were opened.

        Raises:
            OSError: One is not.
        """
        for file in self._files():
            file.check_unchanged()

    def _files(self) -> Iterator[ByteFile]:
        keys = (p.key for loads in self._steps for load in loads for p in load.pieces)
        extents = (self._infos[key].extent for key in keys)
        files = {id(each.file): each.file for each in extents if each is not None}
        yield from files.values()

    def _note(self) -> None:
        in_place = self._destinations.bytes_in_place
        if in_place:
            self._workspace.note(
                f"weights: {in_place:,} bytes stay in the file and are read when first "
                "used; pass `open_source(..., mmap=False)` to copy them"
            )
        if self._sharing is not None:
            self._workspace.note(
                f"weights: {self._sharing.bytes_received:,} bytes came from other "
                "ranks of this node, which read them for all"
            )


def _cuts(load: Load, destination: Destination) -> Iterator[tuple[str, Cut]]:
    for piece in load.pieces:
        for part in cut(piece, load.target.shape, destination.region):
            yield piece.key, part

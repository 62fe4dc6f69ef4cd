"""What a detector is given, and the list of detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from deferred_init.audit.graph import ObjectGraph, Place
from deferred_init.audit.snapshot import Snapshot, TensorBefore
from deferred_init.report import Finding

__all__ = ["Detector", "Scene", "detectors", "register_detector"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Everything that a detector may look at; it must change none of it.

    Attributes:
        graph: Every place and module found.
        optimizers: The optimizers.
        full: Whether values may be read; else at most a few rows, in one batch.
        expected: What stood there before, or None if nobody looked.
        device: Where everything that was deferred has to be, or None.
        dtypes: Dtypes that floating-point tensors may have been given instead of
            their own; if it is a single one and `dtype_forced`, have to have.
        dtype_forced: Whether the caller asked for one dtype for all.
        rebound: Names of tensors of which the report says that they are new objects.
    """

    graph: ObjectGraph
    optimizers: tuple[Optimizer, ...] = ()
    full: bool = False
    expected: Snapshot | None = None
    device: torch.device | None = None
    dtypes: frozenset[torch.dtype] = frozenset()
    dtype_forced: bool = False
    rebound: frozenset[str] = frozenset()
    _pairs: list[tuple[TensorBefore, Place]] = field(default_factory=list, repr=False)

    def pairs(self) -> Sequence[tuple[TensorBefore, Place]]:
        """List each tensor of the snapshot once, with what stands in its place now."""
        if not self._pairs and self.expected is not None:
            now, seen = self.graph.by_fqn, set()
            for fqn, before in self.expected.tensors.items():
                place = now.get(fqn)
                if place is not None and place.tensor_id not in seen:
                    seen.add(place.tensor_id)
                    self._pairs.append((before, place))
        return self._pairs

    def is_rebound(self, fqn: str) -> bool:
        """Whether a name is of a new object, or of something that it carries."""
        parts = fqn.split(".")
        ends = range(len(parts), 0, -1)
        return any(".".join(parts[:end]) in self.rebound for end in ends)


Detector = Callable[[Scene], Iterable[Finding]]
_detectors: list[Detector] = []


def register_detector(detector: Detector) -> Detector:
    """Add a detector to every audit from now on; may be used as a decorator.

    Args:
        detector: Called with a `Scene`; yields findings. Runs after those that were
            registered before. Registering one again changes nothing.
    """
    if detector not in _detectors:
        _detectors.append(detector)
    return detector


def detectors() -> tuple[Detector, ...]:
    """Return all registered detectors, in order."""
    return tuple(_detectors)

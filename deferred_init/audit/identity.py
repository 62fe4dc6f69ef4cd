"""Detectors: which tensors are the same object, and which share memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from deferred_init.aliases import (
    byte_span,
    has_own_dispatch,
    is_deferred,
    storage_key,
)
from deferred_init.audit.graph import Place
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.audit.snapshot import Share
from deferred_init.report import Finding

__all__: list[str] = []


@register_detector
def broken_ties(scene: Scene) -> Iterator[Finding]:
    """Find names that held one object before and hold several now."""
    if scene.expected is None:
        return
    for names in scene.expected.ties:
        places = [scene.graph.by_fqn[n] for n in names if n in scene.graph.by_fqn]
        for place in places[1:]:
            if place.tensor is not places[0].tensor:
                yield Finding(
                    code="broken-tie",
                    fqn=place.fqn,
                    message=f"expected the same tensor object as `{places[0].fqn}`, to "
                    "which it was tied, found another one; assign one to the other",
                )


@register_detector
def broken_views(scene: Scene) -> Iterator[Finding]:
    """Find tensors that shared memory before and do not, or elsewhere, now."""
    if scene.expected is None:
        return
    for group in scene.expected.shares:
        now = [_share_now(scene, share) for share in group]
        present = [(old, new) for old, new in zip(group, now, strict=True) if new]
        if len(present) < 2 or any(_was_cast(scene, old) for old in group):
            continue
        (first_old, first), rest = present[0], present[1:]
        for old, new in rest:
            if storage_key(new.tensor) != storage_key(first.tensor):
                found = "memory of its own"
            elif _distance(first, new) != old.offset_bytes - first_old.offset_bytes:
                found = f"it {_distance(first, new)} bytes after its begin"
            else:
                continue
            yield Finding(
                code="broken-view",
                fqn=new.fqn,
                message=f"expected memory of `{first.fqn}`, "
                f"{old.offset_bytes - first_old.offset_bytes} bytes after its begin, "
                f"found {found}; make it a view of `{first.fqn}` again",
            )


@register_detector
def duplicate_storage(scene: Scene) -> Iterator[Finding]:
    """Find pairs of Parameter objects that overlap in memory."""
    by_storage: dict[int, dict[int, Place]] = {}
    for place in scene.graph.in_scope("model"):
        tensor = place.tensor
        if place.kind != "parameter" or has_own_dispatch(type(tensor)):
            continue
        if is_deferred(tensor) or tensor.numel() == 0:
            continue
        key = storage_key(tensor)
        if key is not None:
            by_storage.setdefault(key, {}).setdefault(place.tensor_id, place)
    for same in by_storage.values():
        if len(same) > 1:
            yield from _overlaps(scene, list(same.values()))


@register_detector
def replaced_objects(scene: Scene) -> Iterator[Finding]:
    """Find parameters and buffers that are new objects, of which nobody was told."""
    if scene.expected is None:
        return
    for fqn, before in scene.expected.tensors.items():
        place = scene.graph.by_fqn.get(fqn)
        if place is None or not before.place.registered or fqn in scene.rebound:
            continue
        if place.tensor is not before.tensor:
            yield Finding(
                code="replaced-object",
                fqn=fqn,
                message="expected the same tensor object with new contents, found a "
                "new object; whoever held the old one (an optimizer, an EMA copy) "
                "holds a tensor that nobody uses",
            )


@register_detector
def touched_real_tensors(scene: Scene) -> Iterator[Finding]:
    """Find tensors that had memory before and were written or given new memory."""
    if scene.expected is None:
        return
    for fqn, before in scene.expected.tensors.items():
        if before.deferred or before.version is None or before.tensor.is_meta:
            continue
        tensor = before.tensor
        moved = before.storage is not None and storage_key(tensor) != before.storage
        if moved or tensor._version != before.version:
            yield Finding(
                code="touched-real-tensor",
                fqn=fqn,
                message="expected a tensor that had memory already to be left alone, "
                f"found {'new memory behind it' if moved else 'that it was written'}; "
                "load its values again",
            )


def _share_now(scene: Scene, share: Share) -> Place | None:
    place = scene.graph.by_fqn.get(share.place.fqn)
    if place is None or is_deferred(place.tensor):
        return None
    return place


def _was_cast(scene: Scene, share: Share) -> bool:
    """Whether a cast separated it, as `Module.to(dtype)` does."""
    assert scene.expected is not None
    place = scene.graph.by_fqn.get(share.place.fqn)
    before = scene.expected.tensors[share.place.fqn]
    return place is not None and place.tensor.dtype != before.dtype


def _distance(first: Place, other: Place) -> int:
    return byte_span(other.tensor)[0] - byte_span(first.tensor)[0]


def _overlaps(scene: Scene, places: Sequence[Place]) -> Iterator[Finding]:
    """Compare neighbours in memory; only what surely overlaps counts."""
    ordered = sorted(places, key=lambda place: byte_span(place.tensor))
    for first, other in pairwise(ordered):
        same = _geometry(first.tensor) == _geometry(other.tensor)
        dense = first.tensor.is_contiguous() and other.tensor.is_contiguous()
        overlap = byte_span(other.tensor)[0] < byte_span(first.tensor)[1]
        if (same or (dense and overlap)) and not _shared_before(scene, first, other):
            yield Finding(
                code="duplicate-storage",
                fqn=other.fqn,
                message=f"expected memory of its own, or the very Parameter object "
                f"`{first.fqn}`, found another Parameter over the same memory: "
                "gradients are split and both are updated; assign one to the other",
            )


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def _shared_before(scene: Scene, first: Place, other: Place) -> bool:
    if scene.expected is None:
        return False
    pair = {first.fqn, other.fqn}
    groups = ({share.place.fqn for share in group} for group in scene.expected.shares)
    return any(pair <= names for names in groups)

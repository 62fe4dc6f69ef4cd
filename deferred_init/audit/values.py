"""Detectors: values that cannot be meant.

[Note: Reading values without waiting]
Counts are computed where the tensors are and stay there; all counts of a device are
read back at once. `fast` reads the padding rows alone; `full` reads everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from deferred_init.aliases import has_own_dispatch, is_deferred
from deferred_init.audit.graph import Place
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.poison import count_poison, in_parts
from deferred_init.report import Finding

__all__: list[str] = []


class _Counts:
    """Counts that are still on their devices."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, list[tuple[Place, Tensor]]] = {}

    def add(self, place: Place, count: Tensor) -> None:
        self._by_device.setdefault(count.device, []).append((place, count))

    def nonzero(self) -> Iterator[tuple[Place, int]]:
        """Read all counts, once per device, and yield those that are not zero."""
        for waiting in self._by_device.values():
            numbers = torch.stack([count for _, count in waiting]).tolist()
            for (place, _), number in zip(waiting, numbers, strict=True):
                if number:
                    yield place, number


@register_detector
def padding_rows(scene: Scene) -> Iterator[Finding]:
    """Find embeddings whose padding row is not zero."""
    counts = _Counts()
    num_places = Counter(
        place.tensor_id for place in scene.graph.places if place.kind == "parameter"
    )
    for place in scene.graph.places:
        if place.kind != "parameter" or place.name != "weight":
            continue
        row = vars(place.owner).get("padding_idx")
        weight = place.tensor
        if type(row) is not int or weight.dim() != 2 or not _readable(weight):
            continue
        if not _fresh(scene, place, num_places[place.tensor_id]):
            continue
        if -weight.size(0) <= row < weight.size(0):
            counts.add(place, _nonzero(weight.detach()[row]))
    for place, number in counts.nonzero():
        yield Finding(
            code="padding-row",
            fqn=place.fqn,
            message=f"expected row {vars(place.owner)['padding_idx']} (`padding_idx`) "
            f"to be zero, found {number} other values; zero it after initializing, "
            "unless the row was loaded or its eager constructor leaves it so",
            severity="warning",
        )


@register_detector
def poison_and_nonfinite(scene: Scene) -> Iterator[Finding]:
    """Find memory that nobody wrote, NaN, and infinite parameters."""
    if not scene.full:
        return
    poison, nan, infinite = _Counts(), _Counts(), _Counts()
    seen: set[int] = set()
    for place in scene.graph.in_scope("model"):
        # Of a DTensor what is here; the rest is read where it is.
        tensor = _part(place)
        if id(tensor) in seen or place.kind == "gradient" or not _readable(tensor):
            continue
        seen.add(id(tensor))
        unwritten = count_poison(tensor)
        if unwritten is not None:
            poison.add(place, unwritten)
        if tensor.is_floating_point() or tensor.is_complex():
            nan.add(place, _count(tensor, torch.isnan))
            if place.kind == "parameter" or _has_statistics(place.owner):
                infinite.add(place, _count(tensor, torch.isinf))
    poisoned: dict[str, int] = {}
    for place, number in poison.nonzero():
        poisoned[place.fqn] = number
        yield Finding(
            code="poison-left",
            fqn=place.fqn,
            message=f"expected values everywhere, found {number} of "
            f"{_part(place).numel()} elements that nobody wrote; its initializer has "
            "to fill the whole tensor",
        )
    for counts, what in ((nan, "NaN"), (infinite, "infinite")):
        for place, number in counts.nonzero():
            rest = number - (poisoned.get(place.fqn, 0) if what == "NaN" else 0)
            if rest > 0:
                yield Finding(
                    code="not-finite",
                    fqn=place.fqn,
                    message=f"expected finite values, found {rest} {what} of "
                    f"{_part(place).numel()}; look at the initializer's arguments, or "
                    "at the checkpoint",
                )


def _part(place: Place) -> Tensor:
    """Return what this rank has of a tensor."""
    return getattr(place.tensor, "_local_tensor", place.tensor)


def _fresh(scene: Scene, place: Place, num_places: int) -> bool:
    """Tell whether a padding row has to be zero still.

    A row that was loaded need not be, and one that an output layer shares is trained.
    """
    if scene.expected is not None:
        before = scene.expected.tensors.get(place.fqn)
        return before is not None and before.deferred
    return num_places == 1


def _readable(tensor: Tensor) -> bool:
    """Whether values can be read here and now, without other processes."""
    return (
        not has_own_dispatch(type(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.numel() > 0
        and not is_deferred(tensor)
    )


def _nonzero(row: Tensor) -> Tensor:
    if row.dtype.itemsize == 1:  # the 8-bit formats compute next to nothing
        row = row.to(torch.float32)
    return torch.count_nonzero(row)


def _count(tensor: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    data = tensor.detach()
    if data.dtype.itemsize == 1:
        data = _widened(data)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in in_parts(data):
        total += test(part).sum()
    return total


def _widened(data: Tensor) -> Tensor:
    if data.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return torch.zeros(1, device=data.device)  # it has neither NaN nor infinity
    return data.to(torch.float32)


def _has_statistics(owner: nn.Module | None) -> bool:
    return isinstance(owner, nn.modules.batchnorm._NormBase)

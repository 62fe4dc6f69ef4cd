"""Detector: tensors without memory, wherever they are held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deferred_init.aliases import has_own_dispatch, is_deferred
from deferred_init.audit.graph import Place
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.report import Finding

__all__: list[str] = []


@register_detector
def deferred_tensors(scene: Scene) -> Iterator[Finding]:
    """Find tensors that are deferred themselves, or keep data in one that is."""
    reported: set[int] = set()
    for place in scene.graph.places:
        tensor = place.tensor
        if is_deferred(tensor):
            if place.scope == "model" or place.tensor_id not in scene.graph.model_ids:
                yield _finding(place)
        elif place.tensor_id not in reported:
            reported.add(place.tensor_id)
            yield from _inner(place)


def _finding(place: Place) -> Finding:
    tensor = place.tensor
    where = "" if place.owner is None else f" of `{type(place.owner).__name__}`"
    if is_lazy(tensor):
        return Finding(
            code="deferred-tensor",
            fqn=place.fqn,
            message=f"expected a tensor with memory, found {place.kind}{where} that "
            "has no shape yet; run a forward with a dummy input, or use the class "
            "that is not lazy",
        )
    shape = f"{tuple(tensor.shape)}, {tensor.dtype}"
    if place.scope == "model":
        return Finding(
            code="deferred-tensor",
            fqn=place.fqn,
            message=f"expected a tensor with memory, found {place.kind}{where} without "
            f"({shape}); make it with `materialize`, or load it",
        )
    return Finding(
        code=f"deferred-in-{place.scope}",
        fqn=place.fqn,
        message=f"expected a tensor with memory, found one without ({shape}) that is "
        f"not the model's; build the {place.scope} again from the model as it is now, "
        "or pass the model that it belongs to as well",
    )


def _inner(place: Place) -> Iterator[Finding]:
    """Look at what a tensor subclass keeps its data in."""
    tensor = place.tensor
    if not has_own_dispatch(type(tensor)):
        return
    for name in _inner_names(tensor):
        inner = getattr(tensor, name, None)
        if isinstance(inner, torch.Tensor) and is_deferred(inner):
            yield Finding(
                code="deferred-tensor",
                fqn=f"{place.fqn}.{name}",
                message=f"expected memory behind a `{type(tensor).__name__}`, found "
                f"a deferred tensor in its `{name}`; materialize the model first, "
                "then convert or shard it",
            )


def _inner_names(tensor: Tensor) -> tuple[str, ...]:
    if isinstance(getattr(tensor, "_local_tensor", None), Tensor):
        return ("_local_tensor",)
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return ()
    names, _ = flatten(tensor)
    return tuple(names)

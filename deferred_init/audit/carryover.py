"""Detectors: what a tensor carried before and has to carry still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.aliases import has_own_dispatch, is_deferred
from deferred_init.audit.hooks import hook_is_registered
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.audit.snapshot import TensorBefore, geometry, tensor_hooks
from deferred_init.distributed.fsdp2 import offload_devices
from deferred_init.report import Finding

__all__: list[str] = []

_COMPARABLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype)


@register_detector
def lost_tensors(scene: Scene) -> Iterator[Finding]:
    """Find places that held a tensor and are gone."""
    if scene.expected is None:
        return
    for fqn, before in scene.expected.tensors.items():
        if fqn not in scene.graph.by_fqn and not scene.is_rebound(fqn):
            yield Finding(
                code="lost-tensor",
                fqn=fqn,
                message=f"expected the {before.place.kind} that stood here before, "
                "found nothing; put it back",
            )


@register_detector
def changed_flags(scene: Scene) -> Iterator[Finding]:
    """Find frozen weights that thawed, and the reverse."""
    for before, place in scene.pairs():
        now = place.tensor.requires_grad
        if now != before.requires_grad:
            yield Finding(
                code="requires-grad-changed",
                fqn=place.fqn,
                message=f"expected requires_grad={before.requires_grad} as before, "
                f"found {now}: it {'thawed' if now else 'was frozen'}; call "
                f"`requires_grad_({before.requires_grad})`",
            )


@register_detector
def changed_geometry(scene: Scene) -> Iterator[Finding]:
    """Find other sizes or strides."""
    for before, place in scene.pairs():
        tensor = place.tensor
        size, stride = geometry(tensor)
        if size != before.size:
            wrong = f"size {tuple(before.size)}", f"{tuple(size)}"
        elif stride is not None and stride != before.stride and tensor.numel() > 1:
            wrong = f"strides {before.stride}", f"{stride}"
        else:
            continue
        yield Finding(
            code="geometry-changed",
            fqn=place.fqn,
            message=f"expected {wrong[0]} as before, found {wrong[1]}; its initializer "
            "must fill what it is given, or adopt a tensor of the same geometry",
        )


@register_detector
def changed_dtypes(scene: Scene) -> Iterator[Finding]:
    """Find dtypes that are neither the tensor's own nor asked for."""
    for before, place in scene.pairs():
        if place.tensor.dtype == before.dtype and not scene.dtype_forced:
            continue
        expected = _expected_dtypes(scene, before)
        if place.tensor.dtype not in expected:
            yield Finding(
                code="wrong-dtype",
                fqn=place.fqn,
                message="expected "
                f"{' or '.join(sorted(map(str, expected)))}, found "
                f"{place.tensor.dtype}; build the model with the dtype that it shall "
                "have, or pass `dtype=`",
            )


@register_detector
def wrong_devices(scene: Scene) -> Iterator[Finding]:
    """Find tensors that were made on another device than asked for."""
    if scene.device is None:
        return
    kept_elsewhere = offload_devices(found.module for found in scene.graph.modules)
    for before, place in scene.pairs():
        tensor = place.tensor
        expected = kept_elsewhere.get(place.tensor_id, scene.device)
        if before.deferred and tensor.device != expected and not is_deferred(tensor):
            yield Finding(
                code="wrong-device",
                fqn=place.fqn,
                message=f"expected device {expected}, found {tensor.device}; move it "
                f"with `.to({str(expected)!r})`",
            )


@register_detector
def lost_attributes(scene: Scene) -> Iterator[Finding]:
    """Find Python attributes of tensors that are gone or have another value."""
    for before, place in scene.pairs():
        if not before.attributes:
            continue
        now = place.tensor.__dict__
        own_way = has_own_dispatch(type(place.tensor))
        for name, value in before.attributes.items():
            if name not in now:
                found = "it is gone"
            elif not own_way and _differs(value, now[name]):
                found = f"`{_short(now[name])}`"
            else:
                continue
            yield Finding(
                code="lost-attribute",
                fqn=f"{place.fqn}.{name}",
                message=f"expected the attribute to be `{_short(value)}` as before, "
                f"found that {found}; set it again on the parameter",
            )


@register_detector
def lost_hooks(scene: Scene) -> Iterator[Finding]:
    """Find tensor hooks that are gone, or of which autograd does not know."""
    for before, place in scene.pairs():
        if not before.hooks or is_deferred(place.tensor):
            continue
        now = tensor_hooks(place.tensor)
        for table, hooks in before.hooks.items():
            kept = [id(hook) for hook in now.get(table, ())]
            lost = sum(id(hook) not in kept for hook in hooks)
            if lost:
                found = f"{len(hooks) - lost}"
            elif not hook_is_registered(place.tensor, table):
                found = f"{len(hooks)} that autograd does not know, so none ever runs"
            else:
                continue
            yield Finding(
                code="lost-hook",
                fqn=place.fqn,
                message=f"expected {len(hooks)} hooks in `{table}` as before, found "
                f"{found}; register them again",
            )


@register_detector
def unknown_hooks(scene: Scene) -> Iterator[Finding]:
    """Find hooks that stand in a Python table only; needs no snapshot."""
    checked = set(scene.expected.tensors) if scene.expected is not None else set()
    seen: set[int] = set()
    for place in scene.graph.in_scope("model"):
        tensor = place.tensor
        if place.kind != "parameter" or place.tensor_id in seen or place.fqn in checked:
            continue
        seen.add(place.tensor_id)
        if is_deferred(tensor):
            continue
        for table, hooks in tensor_hooks(tensor).items():
            if not hook_is_registered(tensor, table):
                yield Finding(
                    code="lost-hook",
                    fqn=place.fqn,
                    message=f"expected autograd to know the {len(hooks)} hooks in "
                    f"`{table}`, found that it does not, so none ever runs; register "
                    "them again",
                )


def _expected_dtypes(scene: Scene, before: TensorBefore) -> frozenset[torch.dtype]:
    own = frozenset((before.dtype,))
    castable = before.dtype.is_floating_point and before.dtype.itemsize > 1
    if not (before.deferred and castable and scene.dtypes):
        return own
    if scene.dtype_forced and before.place.registered:
        return scene.dtypes
    return own | scene.dtypes


def _differs(old: Any, new: Any) -> bool:
    if old is new or isinstance(old, (Tensor, nn.Module)):
        return False
    if isinstance(old, _COMPARABLE) and isinstance(new, _COMPARABLE):
        return bool(type(old) is not type(new) or (old != new and old == old))
    return True


def _short(value: object) -> str:
    if isinstance(value, _COMPARABLE):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(value).__name__}"

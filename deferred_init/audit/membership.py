"""Detectors: optimizers and other holders of tensors that are not the model's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from deferred_init.aliases import is_deferred
from deferred_init.audit.graph import Place
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.errors import listing
from deferred_init.report import Finding

__all__: list[str] = []

# State of torch's optimizers that is as large as the parameter.
_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("sum", "square_avg", "acc_delta", "grad_avg", "prev", "step_size", "ax"),
    }
)
_OWN_SHAPES = ("Adafactor", "LBFGS", "SparseAdam")


@register_detector
def foreign_parameters(scene: Scene) -> Iterator[Finding]:
    """Find parameters of optimizers that no model has."""
    models = scene.graph.model_ids
    unheld = _unheld_parameters(scene) if scene.optimizers else set()
    for index, optimizer in enumerate(scene.optimizers):
        label = f"optimizers[{index}]"
        params = [p for _, _, p in _params(optimizer)]
        if params and not any(id(param) in models for param in params):
            yield Finding(
                code="optimizer-foreign",
                fqn=label,
                message=f"expected parameters of the model, found {len(params)} that "
                f"are all others' ({type(optimizer).__name__}); build it from "
                "`model.parameters()` of this very model",
            )
            continue
        for group, position, param in _params(optimizer):
            if id(param) in models:
                continue
            place = f"{label}.param_groups[{group}][{position}]"
            yield from _stale(place, param, unheld, "optimizer")


@register_detector
def changed_membership(scene: Scene) -> Iterator[Finding]:
    """Find optimizer groups that hold others than the tensors of the same names."""
    if scene.expected is None:
        return
    now = scene.graph.by_fqn
    pairs = zip(scene.optimizers, scene.expected.groups, strict=True)
    for index, (optimizer, names) in enumerate(pairs):
        lost = [
            fqn
            for group, wanted in zip(optimizer.param_groups, names, strict=False)
            for held in ({id(param) for param in group["params"]},)
            for fqn in wanted
            if fqn is not None and not _is_held(fqn, now, held, scene)
        ]
        if lost:
            yield Finding(
                code="optimizer-stale",
                fqn=f"optimizers[{index}]",
                message=f"expected the parameters that it was built with, found that "
                f"{len(lost)} of them are not in their place: {listing(lost)}; they "
                "would never be trained. Build the optimizer again",
            )
        for number, wanted in enumerate(names):
            positions = _positions(optimizer, number, wanted, scene)
            if positions != sorted(positions):
                yield Finding(
                    code="optimizer-order",
                    fqn=f"optimizers[{index}].param_groups[{number}]",
                    message="expected its parameters in the order in which it was "
                    "built, found another; a saved optimizer state, which goes by "
                    "position, would be loaded for the wrong ones. Put them in order",
                )


def _positions(
    optimizer: Optimizer, number: int, wanted: tuple[str | None, ...], scene: Scene
) -> list[int]:
    """Where the parameters of some names stand in a group now."""
    group = optimizer.param_groups[number]["params"]
    places = {id(param): position for position, param in enumerate(group)}
    now = scene.graph.by_fqn
    present = (n for n in wanted if n in now and n not in scene.rebound)
    ids = (now[name].tensor_id for name in present if name is not None)
    return [places[key] for key in ids if key in places]


def _is_held(fqn: str, now: Any, held: set[int], scene: Scene) -> bool:
    """Whether the tensor of a name, or what it was joined into, is in a group."""
    if fqn not in now:
        return fqn in scene.rebound
    return now[fqn].tensor_id in held


@register_detector
def wrong_state(scene: Scene) -> Iterator[Finding]:
    """Find optimizer state that is deferred, misshapen, elsewhere or orphaned."""
    for index, optimizer in enumerate(scene.optimizers):
        label = f"optimizers[{index}].state"
        numbers = {
            id(param): number for number, (_, _, param) in enumerate(_params(optimizer))
        }
        own = type(optimizer)
        checked = (
            own.__module__.startswith("torch.optim") and own.__name__ not in _OWN_SHAPES
        )
        state_items: list[tuple[Any, Any]] = list(optimizer.state.items())
        for param, state in state_items:
            if not isinstance(param, Tensor):  # names, before a state is loaded
                continue
            number = numbers.get(id(param))
            if number is None:
                yield Finding(
                    code="optimizer-orphan-state",
                    fqn=label,
                    message="expected state of its own parameters, found state of a "
                    f"{tuple(param.shape)} tensor in none of its groups; the "
                    "parameter was replaced: build the optimizer again",
                )
            elif isinstance(state, dict):
                yield from _state_of(f"{label}[{number}]", param, state, checked)


@register_detector
def stale_holders(scene: Scene) -> Iterator[Finding]:
    """Find holders that no longer hold the model's tensors."""
    now = scene.graph.by_fqn
    if scene.expected is not None:
        for place_fqn, fqn in scene.expected.held.items():
            held, wanted = now.get(place_fqn), now.get(fqn)
            if held is None or wanted is None or held.tensor is wanted.tensor:
                continue
            yield Finding(
                code="holder-stale",
                fqn=place_fqn,
                message=f"expected the tensor of `{fqn}` as before, found another one; "
                f"assign the model's tensor to it",
            )
        return
    by_holder: dict[str, list[Place]] = {}
    for place in scene.graph.in_scope("holder"):
        if place.owner is None and isinstance(place.tensor, nn.Parameter):
            by_holder.setdefault(place.fqn.partition("]")[0], []).append(place)
    for places in by_holder.values():
        held_ids = {place.tensor_id for place in places}
        if held_ids.isdisjoint(scene.graph.model_ids):
            continue  # a copy of its own, such as an EMA
        missing = _shapes(p for p in _model_parameters(scene) if id(p) not in held_ids)
        for place in places:
            if place.tensor_id not in scene.graph.model_ids:
                yield from _stale(place.fqn, place.tensor, missing, "holder")


def _stale(
    fqn: str, param: Tensor, unheld: set[tuple[Any, ...]], scope: str
) -> Iterator[Finding]:
    """Say that a stranger stands where a parameter of the model belongs."""
    shape = f"{tuple(param.shape)}, {param.dtype}"
    if is_deferred(param):
        code, found = f"deferred-in-{scope}", f"a deferred one ({shape})"
    elif (tuple(param.shape), param.dtype) in unheld:
        code = f"{scope}-stale"
        found = f"a stranger ({shape}), while the model has one like it that is missing"
    else:
        return
    yield Finding(
        code=code,
        fqn=fqn,
        message=f"expected a parameter of the model, found {found}; build the {scope} "
        "again from the model as it is now",
    )


def _state_of(
    label: str, param: Tensor, state: dict[Any, Any], checked: bool
) -> Iterator[Finding]:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if is_deferred(value):
            code, what = "optimizer-state-deferred", ("memory", "none")
        elif not checked or key not in _LIKE_PARAMETER or is_deferred(param):
            continue
        elif value.size() != param.size():
            code = "optimizer-state-shape"
            what = f"shape {tuple(param.shape)}", f"{tuple(value.shape)}"
        elif value.device != param.device:
            code, what = (
                "optimizer-state-device",
                (f"{param.device}", f"{value.device}"),
            )
        else:
            continue
        yield Finding(
            code=code,
            fqn=f"{label}[{key!r}]",
            message=f"expected {what[0]}, found {what[1]}; clear it with "
            "`optimizer.state.clear()`, or load the optimizer's state again",
        )


def _params(optimizer: Optimizer) -> Iterator[tuple[int, int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            yield number, position, param


def _model_parameters(scene: Scene) -> Iterator[Tensor]:
    for place in scene.graph.in_scope("model"):
        tensor = place.tensor
        if place.kind == "parameter" and tensor.requires_grad and not is_lazy(tensor):
            yield tensor


def _unheld_parameters(scene: Scene) -> set[tuple[Any, ...]]:
    """Shapes of trainable parameters that no optimizer holds."""
    held = {id(p) for optimizer in scene.optimizers for _, _, p in _params(optimizer)}
    return _shapes(p for p in _model_parameters(scene) if id(p) not in held)


def _shapes(tensors: Iterable[Tensor]) -> set[tuple[Any, ...]]:
    found: set[tuple[torch.Size | Any, torch.dtype]] = set()
    found.update((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return found

"""Ways to get a model with values onto a device: a user's choices, and ours.

Each way is a pair: what builds the model, and what fills it. A way without a second
half fills while it builds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from construct_models import Shape, hugging_face, stored_as, transformer_engine
from torch import nn

import deferred_init as di
from deferred_init.rng import POLICIES


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to come to a model.

    Attributes:
        name: What a user would call it.
        build: Builds the model, with or without memory.
        fill: Gives it memory and values; returns the model.
        slow: Whether it draws all numbers on the CPU.
    """

    name: str
    build: Callable[[], nn.Module]
    fill: Callable[[nn.Module], nn.Module]
    slow: bool = False


def ways_of(shape: Shape, recipe: str, device: str) -> list[Way]:
    """Return all ways that a model of this library has; the first is eager."""
    if shape.library == "te":
        return _transformer_engine(shape, recipe, device)
    if recipe != "bf16":
        return []
    return _hugging_face(shape, device)


def _hugging_face(shape: Shape, device: str) -> list[Way]:
    build = hugging_face(shape)
    return [
        Way(name=f"eager on {device}", build=partial(_on, device, build), fill=_same),
        Way(
            name=f"eager on cpu, .to({device})",
            build=build,
            fill=lambda model: model.to(device),
            slow=True,
        ),
        Way(
            name="meta, to_empty, init_weights",
            build=partial(_on, "meta", build),
            fill=partial(_to_empty, device),
        ),
        Way(
            name="accelerate init_empty_weights, to_empty, init_weights",
            build=partial(_accelerate, build),
            fill=partial(_to_empty, device),
        ),
        *_ours(
            partial(_on, "meta", build), partial(di.deferred_init, build), None, device
        ),
    ]


def _transformer_engine(shape: Shape, recipe: str, device: str) -> list[Way]:
    def build(where: str) -> nn.Module:
        with stored_as(recipe):
            return transformer_engine(shape, where)

    def deferred() -> nn.Module:
        with di.on_meta():
            return transformer_engine(shape, "meta")

    preset = None if recipe == "bf16" else recipe
    return [
        Way(name=f"eager on {device}", build=partial(build, device), fill=_same),
        Way(
            name="meta, TE's reset_parameters loop",
            build=partial(build, "meta"),
            fill=_reset,
        ),
        *_ours(deferred, None, preset, device),
    ]


def _ours(
    on_meta: Callable[[], nn.Module],
    recorded: Callable[[], nn.Module] | None,
    preset: str | None,
    device: str,
) -> list[Way]:
    found = [
        Way(
            name="meta, materialize",
            build=on_meta,
            fill=partial(_materialize, device, preset, "eager"),
        )
    ]
    if recorded is not None:
        found.append(
            Way(
                name="deferred_init, materialize",
                build=recorded,
                fill=partial(_materialize, device, preset, "eager"),
            )
        )
    if "fast" in POLICIES:
        fast = partial(_materialize, device, preset, "fast")
        name = 'meta, materialize(rng="fast")'
        found.append(Way(name=name, build=on_meta, fill=fast))
    return found


def _same(model: nn.Module) -> nn.Module:
    return model


def _on(device: str, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device(device):
        return build()


def _accelerate(build: Callable[[], nn.Module]) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return build()


def _to_empty(device: str, model: nn.Module) -> nn.Module:
    model = model.to_empty(device=device)
    initialize: Any = model.init_weights
    initialize()
    return model


def _reset(model: nn.Module) -> nn.Module:
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def _materialize(
    device: str, preset: str | None, rng: str, model: nn.Module
) -> nn.Module:
    di.materialize(model, device, preset, seed=0, rng=rng, progress=False)
    return model

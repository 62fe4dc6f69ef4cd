"""Append nodes to a recording, with the generator events that precede a draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deferred_init.record.events import Reseed
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Node, Storage, Stream, Value
from deferred_init.record.watch import identity, is_seeded_state, stream_of

__all__ = ["Draw", "append", "append_fill"]


class Draw:
    """Says that an operation draws, with the explicit generator if it has one."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator


def append(
    recording: Recording,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    writes: tuple[Storage, ...] = (),
    draw: Draw | None = None,
    device: torch.device | None = None,
    overwrites: Value | None = None,
) -> Node:
    """Append one node; the caller holds the lock and sets `outs` afterwards."""
    if draw is None:
        nodes = recording.nodes
        node = Node(len(nodes), call, args, kwargs, (), writes, None, overwrites)
        nodes.append(node)
    else:
        stream = _before_draw(recording, draw, device)
        if draw.generator is not None:  # some overloads insist on one
            kwargs = {**(kwargs or {}), "generator": stream}
        nodes = recording.nodes
        node = Node(len(nodes), call, args, kwargs, (), writes, stream, overwrites)
        nodes.append(node)
        if recording.watch is not None:
            recording.watch.after_draw(stream)
    for storage in writes:
        storage.writers.append(node.index)
    return node


def append_fill(
    recording: Recording,
    value: Value,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    draw: Draw | None,
) -> None:
    """Append an in-place fill of a whole value."""
    append(
        recording,
        call,
        (value, *args),
        writes=(value.storage,),
        draw=draw,
        device=value.device,
        overwrites=value,
    )


def _before_draw(
    recording: Recording, draw: Draw, device: torch.device | None
) -> Stream:
    """Find the stream of a draw, and record what happened to its generator."""
    generator = draw.generator
    if generator is not None and not _is_default(generator):
        return stream_of(recording, generator)
    if recording.watch is not None:
        recording.watch.before_draw(device)
    else:
        _after_constructor(recording)
    return recording.stream_on(device)


def _is_default(generator: torch.Generator) -> bool:
    return identity(generator) == identity(torch.default_generator)


def _after_constructor(recording: Recording) -> None:
    """Record that the default generator was set between construction and now."""
    state = torch.default_generator.get_state()
    if torch.equal(state, recording.cpu_seen):
        return
    seed = torch.default_generator.initial_seed()
    known = seed if is_seeded_state(state, seed) else None
    nodes = recording.nodes
    nodes.append(Reseed(len(nodes), torch.device("cpu"), state, known))
    recording.cpu_seen = state

"""Says in words where recorded values come from, to compare recordings of processes.

[Note: Ranks whose constructors differ]
Problem: ranks may record the same operations with other numbers in them: a scale that
is read from a file that one node has in another version, a fill by the rank. Shapes
and steps are alike then, and the shards would be parts of unlike tensors.

Design: for each value the operations that lead to it are spelled with their plain
arguments and with how many numbers were drawn before, so that the spelling depends on
nothing but what was recorded. Only what a value depends on counts: a buffer that says
which rank it is on may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch
from deferred_init.record.events import Reseed, Resume, Rewind
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import External, Node, Place, Value

__all__ = ["provenance"]

_PLAIN = (bool, int, float, complex, torch.dtype, torch.memory_format)
_READ_BYTES = 1 << 20
"""Real tensors up to this size are compared by their contents."""


def provenance(values: Iterable[Value]) -> list[str]:
    """Spell for each value the operations that it comes from.

    Args:
        values: Recorded values, of any recordings.

    Returns:
        One text per value; equal in two processes if they recorded the same.
    """
    spelled: dict[Recording, list[str]] = {}
    texts = []
    for value in values:
        recording = value.recording
        if recording not in spelled:
            spelled[recording] = list(_spell_all(recording.nodes))
        lines = spelled[recording]
        texts.append("; ".join(lines[index] for index in _leading_to(value)))
    return texts


def _leading_to(value: Value) -> list[int]:
    """Return the nodes that a value depends on, in order."""
    nodes = value.recording.nodes
    pending = [*value.storage.writers]
    found: set[int] = set()
    while pending:
        index = pending.pop()
        if index in found:
            continue
        found.add(index)
        for read in nodes[index].reads:
            pending.extend(each for each in read.storage.writers if each < index)
    return sorted(found)


def _spell_all(nodes: Iterable[Node]) -> Iterator[str]:
    """Spell every node; one that draws with its place among the random numbers."""
    began, drawn = "", 0
    for node in list(nodes):
        if isinstance(node, Reseed):
            began, drawn = f" seeded {_digest(node.state)}", 0
        elif isinstance(node, Rewind):
            began += f" back {node.position}"
        elif isinstance(node, Resume):
            began, drawn = f" on from {node.position} of another recording", 0
        text = _spell(node)
        if node.stream is None:
            pass
        elif node.stream.start is not None:
            text += f" from a generator in state {_digest(node.stream.start)}"
        else:
            text += f" from{began} number {drawn}"
            drawn += _num_written(node)
        yield text


def _spell(node: Node) -> str:
    arguments = [_argument(each) for each in node.args if type(each) is not Value]
    if node.kwargs:
        arguments += [f"{key}={_argument(each)}" for key, each in node.kwargs.items()]
    name = getattr(node.call, "__name__", type(node.call).__name__)
    return f"{name}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, str):  # a rank's own device is no difference
        return repr(value.partition(":")[0])
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, Value):
        return "_"
    if isinstance(value, External):
        return _contents(value.tensor)
    if isinstance(value, Place):
        return "None" if value.device is None else value.device.type
    return type(value).__name__


def _contents(tensor: Tensor) -> str:
    """Spell a real tensor by its shape, and by its bits where they are few and here."""
    text = f"{list(tensor.shape)} {tensor.dtype}"
    few = tensor.numel() * tensor.element_size() <= _READ_BYTES
    if not few or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return text
    if has_own_dispatch(type(tensor)) or tensor.is_quantized:
        return text
    return f"{text} {_digest(tensor)}"


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:12]


def _num_written(node: Node) -> int:
    outs = [out for out in node.outs if out is not None]
    return sum(value.meta.numel() for value in outs or node.reads[:1])

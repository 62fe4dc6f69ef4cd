"""Recompute a tensor that is no leaf, so that gradients flow through it as in eager."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.execution import Environment
from deferred_init.record.nodes import Node, Value
from deferred_init.record.replay import Replay

__all__ = ["recompute"]


def recompute(
    value: Value, leaves: dict[Value, Tensor], device: torch.device
) -> Tensor | None:
    """Compute a value again from real leaf tensors, with gradients recorded.

    Args:
        value: The value of a tensor that was computed from leaves.
        leaves: Real tensors that require gradients, by their values.
        device: The device of the replay.

    Returns:
        The tensor with its `grad_fn`; `None` if it cannot be had that way, since a
        leaf was changed afterwards or the computation draws or writes.
    """
    chain = _chain(value, leaves)
    if not chain:
        return None
    first = chain[0].index
    used = {v for node in chain for v in node.reads if v in leaves}
    if not _is_view(value, chain) and any(
        v.storage.writers and v.storage.writers[-1] > first for v in used
    ):
        return None
    inside = {out for node in chain for out in node.outs}
    constants = {
        v for node in chain for v in node.reads if v not in used and v not in inside
    }
    replay = Replay(value.recording, device)
    order = list(constants)
    constant = replay.values(order, chain[-1].index)
    env: Environment = dict(zip(order, constant, strict=True))
    env.update({v: leaves[v] for v in used})
    with torch.enable_grad():
        for node in chain:
            replay.execute(node, env)
    result = env[value]
    assert isinstance(result, Tensor)
    return result


def _is_view(value: Value, chain: list[Node]) -> bool:
    """Whether a value shares memory with its leaf, so that it follows its changes."""
    outs = [out for node in chain for out in node.outs if out is not None]
    reads = [read for node in chain for read in node.reads]
    return all(other.storage is value.storage for other in (*outs, *reads))


def _chain(value: Value, leaves: dict[Value, Tensor]) -> list[Node]:
    """Return the nodes between leaves and a value, in order; none if there is a bar."""
    nodes = value.recording.nodes
    found: dict[int, Node] = {}
    pending = [value]
    through = False
    while pending:
        current = pending.pop()
        if current in leaves:
            through = True
            continue
        if current.node in found:
            continue
        node = nodes[current.node]
        if node.stream is not None or node.writes:
            return []
        if not _reaches(current, leaves):
            continue
        found[node.index] = node
        pending.extend(node.reads)
    return [found[index] for index in sorted(found)] if through else []


def _reaches(value: Value, leaves: dict[Value, Tensor]) -> bool:
    """Whether a value was computed from any of the leaves."""
    nodes = value.recording.nodes
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current in leaves:
            return True
        if current in seen:
            continue
        seen.add(current)
        pending.extend(nodes[current.node].reads)
    return False

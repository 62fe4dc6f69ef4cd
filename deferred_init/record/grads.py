"""Recompute a tensor that is no leaf, so that gradients flow through it as in eager."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.execution import Environment
from deferred_init.record.nodes import Node, Value
from deferred_init.record.replay import Replay

__all__ = ["recompute"]


# What no gradient goes through, besides results that are no floating-point numbers.
_CUT = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones"}
    | {"new_zeros", "ones_like", "zeros_like"}
)


def recompute(
    value: Value, leaves: dict[Value, Tensor], device: torch.device, real: Tensor
) -> Tensor | None:
    """Compute a value again from real leaf tensors, with gradients recorded.

    Args:
        value: The value of a tensor that was computed from leaves.
        leaves: Real tensors that require gradients, by their values.
        device: The device of the replay.
        real: What the replay of the whole recording gave for the value.

    Returns:
        The tensor with its `grad_fn`; `None` if it cannot be had that way, since a
        leaf or a result on the way was changed afterwards, or the computation draws.
    """
    chain = _chain(value, leaves)
    if not chain:
        return None
    first = chain[0].index
    used = {v for node in chain for v in node.reads if v in leaves}
    is_view = _is_view(value, chain)
    if not is_view and any(
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
    # A result that was written in place is not seen by the chain; its bits tell.
    return result if is_view or _same_bits(result.detach(), real) else None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements, to the bit."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    with torch.no_grad():
        flat = (one.reshape(-1).contiguous(), other.reshape(-1).contiguous())
        return torch.equal(*(each.view(torch.uint8) for each in flat))


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
    """Whether a value was computed from any of the leaves, with a gradient."""
    nodes = value.recording.nodes
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current in leaves:
            return True
        node = nodes[current.node]
        if current in seen or _is_cut(current, node):
            continue
        seen.add(current)
        pending.extend(node.reads)
    return False


def _is_cut(value: Value, node: Node) -> bool:
    dtype = value.dtype
    name = node.name.partition(".")[0]
    return name in _CUT or not (dtype.is_floating_point or dtype.is_complex)

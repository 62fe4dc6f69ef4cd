"""Asks autograd whether it knows a tensor's hooks.

[Note: Hooks live twice]
A hook stands in a Python dict on the tensor object and is registered with the C++
tensor, and a swap of the C++ tensors separates the two: the dict looks right and
nothing ever runs. Python cannot see the C++ side. So the dict, which the C++ side
holds by reference, is emptied for a moment, a probe is put into it, and autograd is
asked for a gradient of zeros: the probe runs if the C++ side has this dict. The user's
hooks do not run, nor do hooks on graph nodes: `autograd.grad` captures before the
AccumulateGrad node, and the node is called directly, not by the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch

__all__ = ["hook_is_registered", "is_leaf"]


def is_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf; False where torch refuses to say.

    torch builds a view's history again when it is asked for, and refuses where the
    base of one of several views that one call returned was changed in place. FSDP1
    (`use_orig_params=False`) leaves such views as attributes of the modules it shards.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def hook_is_registered(tensor: Tensor, table: str) -> bool:
    """Tell whether the hooks in one of a tensor's tables run in backward.

    Args:
        tensor: A tensor with memory and a nonempty table.
        table: `_backward_hooks` or `_post_accumulate_grad_hooks`.

    Returns:
        True also where it cannot be asked: tensors that need no gradient, are no
        leaves, or are of a subclass that keeps its data in its own way.
    """
    plain = not has_own_dispatch(type(tensor))
    in_autograd = tensor.requires_grad and not tensor.is_inference()
    if not (plain and is_leaf(tensor) and in_autograd):
        return True
    hooks: dict[int, Any] = getattr(tensor, table)
    saved = dict(hooks)
    ran: list[None] = []
    hooks.clear()
    hooks[0] = lambda _: ran.append(None)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            if table == "_backward_hooks":
                _ask_for_gradient(tensor)
            else:
                _accumulate_zeros(tensor)
    finally:
        hooks.clear()
        hooks.update(saved)
    return bool(ran)


def _zeros(tensor: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return zero.expand(tensor.size())


def _ask_for_gradient(tensor: Tensor) -> None:
    torch.autograd.grad(tensor.view_as(tensor), tensor, _zeros(tensor))


def _accumulate_zeros(tensor: Tensor) -> None:
    kept, tensor.grad = tensor.grad, None
    try:
        node: Any = torch.autograd.graph.get_gradient_edge(tensor).node
        node(_zeros(tensor))
    finally:
        tensor.grad = kept

"""What a program may do to the tree that it builds; each action is total."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.reliability.tree_parts import (
    CHILDREN,
    INTEGERS,
    VALUES,
    VIEWS,
    Box,
    Marked,
    Node,
    Scale,
    Tree,
)


def _child(tree: Tree, a: int, b: int, c: int) -> None:
    kinds = list(CHILDREN)
    child = CHILDREN[kinds[b % len(kinds)]]()
    owner = tree.node(a)
    owner.add_module(tree.name(c), child)
    tree.modules.append(child)
    places = [i for i, node in enumerate(tree.open) if node is owner]
    if places:  # a constructor that has returned adds nothing more
        del tree.open[places[0] + 1 :]
        tree.open += [child] if isinstance(child, Node) else []


def _share(tree: Tree, a: int, b: int, c: int) -> None:
    """The same module under a second name; never a cycle of registered modules."""
    target = tree.any(b)
    owner = tree.root
    if target is not owner:
        owner.add_module(tree.name(c), target)


def _cycle(tree: Tree, a: int, b: int, c: int) -> None:
    box = Box(None, tree.any(b))
    box.item = [box, tree.root]
    object.__setattr__(tree.node(a), tree.name(1), box)


def _plain_list(tree: Tree, a: int, b: int, c: int) -> None:
    kinds = list(CHILDREN)
    child = CHILDREN[kinds[b % len(kinds)]]()
    held: Any = ([child], {"k": child}, (child,), Box(child, tree.root))[c % 4]
    setattr(tree.node(a), tree.name(1), held)
    tree.modules.append(child)


def _nested(tree: Tree, a: int, b: int, c: int) -> None:
    """A module deep in plain containers, beside a tensor of its own."""
    kinds = list(CHILDREN)
    child = CHILDREN[kinds[b % len(kinds)]]()
    setattr(tree.node(a), tree.name(1), {"k": [({"m": child},), torch.rand(c % 3)]})
    tree.modules.append(child)


def _thread(tree: Tree, a: int, b: int, c: int) -> None:
    """A child that is constructed in another thread."""
    thread = threading.Thread(target=_child, args=(tree, a, b, c))
    thread.start()
    thread.join()


def _subclass(tree: Tree, a: int, b: int, c: int) -> None:
    made = VALUES[b % len(VALUES)]()
    tree.node(a).register_parameter(tree.name(c), Marked(made, c % 4 != 0))


def _nothing(tree: Tree, a: int, b: int, c: int) -> None:
    """A name that is registered and holds nothing."""
    if b % 2:
        tree.node(a).register_parameter(tree.name(c), None)
    else:
        tree.node(a).register_buffer(tree.name(c), None)


def _parameter(tree: Tree, a: int, b: int, c: int) -> None:
    made = VALUES[b % len(VALUES)]()
    tree.node(a).register_parameter(tree.name(c), nn.Parameter(made, c % 4 != 0))


def _buffer(tree: Tree, a: int, b: int, c: int) -> None:
    kinds = VALUES + INTEGERS
    tree.node(a).register_buffer(
        tree.name(c), kinds[b % len(kinds)](), persistent=c % 2 == 0
    )


def _attribute(tree: Tree, a: int, b: int, c: int) -> None:
    made = (VALUES + INTEGERS)[b % len(VALUES + INTEGERS)]()
    held: Any = (made, [made, 3], {"k": [made]}, Box(made, None), (made,))[c % 5]
    setattr(tree.node(a), tree.name(1), held)


def _tie(tree: Tree, a: int, b: int, c: int) -> None:
    if found := tree.parameters():
        tree.node(a).register_parameter(tree.name(c), found[b % len(found)])


def _tie_in_list(tree: Tree, a: int, b: int, c: int) -> None:
    if found := tree.parameters():
        node = tree.node(a)
        setattr(node, tree.name(1), [found[b % len(found)], found[c % len(found)]])


def _view(tree: Tree, a: int, b: int, c: int) -> None:
    if found := tree.tensors():
        base = found[b % len(found)].detach()
        if base.numel() == 0:
            return
        tree.node(a).register_buffer(tree.name(c), VIEWS[c % len(VIEWS)](base))


def _live_view(tree: Tree, a: int, b: int, c: int) -> None:
    """A view with history, kept as a plain attribute."""
    found = [t for t in tree.parameters() if t.dim() and t.numel() and t.requires_grad]
    if found:
        setattr(tree.node(a), tree.name(1), found[b % len(found)][:1])
        tree.has_live_views = True


def _share_data(tree: Tree, a: int, b: int, c: int) -> None:
    """A second Parameter on the memory of a first."""
    if found := tree.parameters():
        twin = nn.Parameter(found[b % len(found)].data, c % 2 == 0)
        tree.node(a).register_parameter(tree.name(c), twin)


def _freeze(tree: Tree, a: int, b: int, c: int) -> None:
    if not tree.has_live_views:
        tree.any(a).requires_grad_(b % 2 == 0)


def _mode(tree: Tree, a: int, b: int, c: int) -> None:
    tree.any(a).train(b % 2 == 0)


def _mark(tree: Tree, a: int, b: int, c: int) -> None:
    if found := tree.tensors():
        tensor = found[a % len(found)]
        tensor.sequence_parallel = bool(b % 2)  # type: ignore[attr-defined]
        if c % 3 == 0:
            tensor.main_grad = torch.zeros(tensor.shape)  # type: ignore[attr-defined]


def _hook(tree: Tree, a: int, b: int, c: int) -> None:
    found = [p for p in tree.parameters() if p.requires_grad]
    if found:
        parameter = found[a % len(found)]
        parameter.register_hook(_double)
        if b % 2:
            parameter.register_post_accumulate_grad_hook(_ignore)
    tree.any(c).register_forward_hook(_observe)


def _change(tree: Tree, a: int, b: int, c: int) -> None:
    """Change a tensor in place, as scaled and residual inits do."""
    found = [t for t in tree.tensors() if t.is_floating_point()]
    if not found:
        return
    tensor = found[a % len(found)]
    if not _writable(tensor):
        return
    with torch.no_grad():
        (
            lambda: tensor.mul_(0.5),
            lambda: tensor.normal_(0, 0.02),
            lambda: tensor.add_(torch.rand((), dtype=tensor.dtype)),
            lambda: tensor.copy_(torch.ones_like(tensor)),
            lambda: tensor.view(-1)[:1].fill_(7) if tensor.is_contiguous() else None,
            lambda: tensor[tensor > 0].mul_(2) if tensor.dim() else None,
        )[b % 6]()


def _replace_data(tree: Tree, a: int, b: int, c: int) -> None:
    found = tree.parameters()
    # A view from before would keep the old memory alive, see docs/reliability.md.
    if found and not tree.has_live_views:
        parameter = found[a % len(found)]
        parameter.data = torch.randn_like(parameter.data)


def _draw(tree: Tree, a: int, b: int, c: int) -> None:
    torch.rand(a % 3 + 1)


def _look(tree: Tree, a: int, b: int, c: int) -> None:
    """Let a Python number depend on a tensor's value."""
    value = torch.linspace(0, 1, 4)[a % 4].item()
    tree.root.register_buffer(tree.name(c), torch.full((2,), value + b))


def _cast(tree: Tree, a: int, b: int, c: int) -> None:
    module = tree.any(a)
    if not tree.has_live_views and not any(
        t.is_complex() for t in [*module.parameters(), *module.buffers()]
    ):
        module.to((torch.bfloat16, torch.float64, torch.float32)[b % 3])


def _parametrize(tree: Tree, a: int, b: int, c: int) -> None:
    linear = nn.Linear(2, 2)
    for _ in range(1 + b % 2):
        nn.utils.parametrize.register_parametrization(linear, "weight", Scale())
    tree.node(a).add_module(tree.name(c), linear)
    tree.modules.append(linear)


def _deepcopy(tree: Tree, a: int, b: int, c: int) -> None:
    target = tree.any(a)
    if tree.has_live_views:
        return  # torch deep copies leaves only
    if target is not tree.root and not _is_cyclic(target):
        child = copy.deepcopy(target)
        tree.root.add_module(tree.name(c), child)
        tree.modules.append(child)


def _delete(tree: Tree, a: int, b: int, c: int) -> None:
    """Take a parameter or buffer away again."""
    module = tree.node(a)
    if tree.has_live_views:
        return
    for table in (module._parameters, module._buffers):
        if table:
            del table[list(table)[b % len(table)]]
            return


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _ignore(parameter: Tensor) -> None:
    pass


def _observe(*args: Any) -> None:
    pass


def _writable(tensor: Tensor) -> bool:
    """Whether no two of its elements share memory."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride > 0 for stride, length in sizes if length > 1)


def _is_cyclic(module: nn.Module) -> bool:
    held = [item for inner in module.modules() for item in vars(inner).values()]
    return any(isinstance(item, Box) for item in held)


ACTIONS: dict[str, Callable[[Tree, int, int, int], None]] = {
    "child": _child,
    "plain list": _plain_list,
    "nested": _nested,
    "thread": _thread,
    "parameter": _parameter,
    "subclass": _subclass,
    "nothing": _nothing,
    "buffer": _buffer,
    "attribute": _attribute,
    "tie": _tie,
    "tie in list": _tie_in_list,
    "view": _view,
    "live view": _live_view,
    "share data": _share_data,
    "share module": _share,
    "cycle": _cycle,
    "freeze": _freeze,
    "mode": _mode,
    "mark": _mark,
    "hook": _hook,
    "change": _change,
    "replace data": _replace_data,
    "draw": _draw,
    "look": _look,
    "cast": _cast,
    "parametrize": _parametrize,
    "deepcopy": _deepcopy,
    "delete": _delete,
}
# What a tree on meta can tell everything about: convention, no values of its own.
CONVENTIONAL = ("child", "tie", "share module", "cycle")
CONVENTIONAL += ("nothing", "freeze", "mode", "mark", "hook")

"""Random module trees: a program of small actions, and what they build.

A program is a tuple of actions `(name, a, b, c)`; the integers choose modules, tensors
and variants modulo what there is, so that any tuple is a program, and a part of a
program too: that is what lets hypothesis shrink a failure to its smallest input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Action = tuple[str, int, int, int]
Program = tuple[Action, ...]

ODD_NAMES = (
    "a b",
    "données",
    "`tick`",
    "a[0]",
    "self",
    "class",
    "0",
    "_",
    "x" * 80,
    "weight",
    "%s{}",
    "fqn\n",
    "parametrization",
)


class Node(nn.Module):
    """A module that has whatever a program gives it."""

    def forward(self) -> Tensor:
        return torch.zeros(())


class Raising(nn.Module):
    """Properties and unknown attributes raise something unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0))

    @property
    def weight_sum(self) -> Tensor:
        raise RuntimeError("not before training")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("table", "inner") or name.startswith("__"):
                raise  # asked for while the module is being built
            raise KeyError(name) from None


class Forwarding(nn.Module):
    """Looks up what it lacks in a module that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Slotted(Node):
    """Has slots, one of which stays unset, beside the attributes of a module."""

    __slots__ = ("note", "unset")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "note", "set")


class Equal(Node):
    """Compares by value and hashes by it, as some configuration modules do."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return 1


class Box:
    """A plain object that holds things and, in a cycle, its owner."""

    def __init__(self, item: Any, owner: Any) -> None:
        self.item = item
        self.owner = owner


class Scale(nn.Module):
    """A parametrization with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / self.factor


CHILDREN: dict[str, Callable[[], nn.Module]] = {
    "Node": Node,
    "Raising": Raising,
    "Forwarding": Forwarding,
    "Slotted": Slotted,
    "equal": Equal,
    "Linear": lambda: nn.Linear(3, 2),
    "frozen Linear": lambda: nn.Linear(2, 3).requires_grad_(False),
    "bfloat16 Linear": lambda: nn.Linear(2, 2, dtype=torch.bfloat16),
    "Embedding": lambda: nn.Embedding(4, 3, padding_idx=1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "LayerNorm": lambda: nn.LayerNorm(3, bias=False),
    "Conv1d": lambda: nn.Conv1d(2, 2, 2),
    "GRU": lambda: nn.GRU(2, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "Sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.PReLU()),
    "ModuleList": lambda: nn.ModuleList([nn.Bilinear(2, 1, 2), nn.Linear(1, 1)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Identity()}),
    "ParameterList": lambda: nn.ParameterList(
        [nn.Parameter(torch.rand(2)), nn.Parameter(torch.zeros(0))]
    ),
    "ParameterDict": lambda: nn.ParameterDict({"k": nn.Parameter(torch.randn(2))}),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(2, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "loss": lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
    "eval Dropout": lambda: nn.Dropout(0.3).eval(),
}

VALUES: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.randn(3, 2),
    lambda: torch.zeros(2, 3),
    lambda: torch.arange(6.0).reshape(2, 3) / 7,
    lambda: torch.linspace(0, 1, 5),
    lambda: torch.tensor(math.pi),
    lambda: torch.zeros(0, 3),
    lambda: torch.rand(()),
    lambda: torch.randn(2, 3).t(),
    lambda: torch.ones(1).expand(4),
    lambda: torch.randn(2, 2, dtype=torch.complex64),
    lambda: torch.rand(3).to(torch.float16),
    lambda: torch.rand(3).to(torch.bfloat16),
    lambda: torch.rand(2, dtype=torch.float64),
    lambda: torch.rand(1, 2, 2, 2).to(memory_format=torch.channels_last),
    lambda: torch.nn.init.orthogonal_(torch.empty(3, 3)),
    lambda: torch.nn.init.trunc_normal_(torch.empty(2, 4), std=0.02),
    lambda: torch.tensor([[1.5, -0.0]]).repeat(2, 2),
)

INTEGERS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.full((2, 2), float("-inf")).triu(1),
    lambda: torch.arange(5),
    lambda: torch.tensor(0),
    lambda: torch.randint(0, 9, (3,)),
    lambda: torch.ones(2, 2, dtype=torch.bool).tril(),
    lambda: torch.tensor([3, 200], dtype=torch.uint8),
    lambda: torch.randperm(4).to(torch.int32),
    lambda: torch.zeros(0, dtype=torch.int64),
)

VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.reshape(-1)[:1],
    lambda t: t.t() if t.dim() == 2 else t.view_as(t),
    lambda t: t[..., None],
    lambda t: t.detach(),
    lambda t: t[1:] if t.dim() else t.view(1),
)


class Tree:
    """What a program has built so far."""

    def __init__(self, conventional: bool = False) -> None:
        self.conventional = conventional
        self.root = Node()
        self.open: list[nn.Module] = [self.root]
        self.modules: list[nn.Module] = [self.root]
        self.counter = 0
        self.has_live_views = False

    def name(self, c: int) -> str:
        self.counter += 1
        if c % 3 == 0:
            return f"{ODD_NAMES[c % len(ODD_NAMES)]}{self.counter}"
        return f"n{self.counter}"

    def node(self, a: int) -> nn.Module:
        """Return a module that any name may be given."""
        nodes = [m for m in self.modules if isinstance(m, Node)]
        if self.conventional:
            nodes = self.open
        return nodes[a % len(nodes)]

    def any(self, a: int) -> nn.Module:
        return self.modules[a % len(self.modules)]

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, without those that parametrizations hold."""
        return [
            tensor
            for module in self.modules
            for table in (module._parameters, module._buffers)
            for tensor in table.values()
            if tensor is not None
        ]

    def parameters(self) -> list[nn.Parameter]:
        return [t for t in self.tensors() if isinstance(t, nn.Parameter)]


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


ACTIONS: dict[str, Callable[[Tree, int, int, int], None]] = {
    "child": _child,
    "plain list": _plain_list,
    "parameter": _parameter,
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
CONVENTIONAL += ("freeze", "mode", "mark", "hook")


def programs(names: tuple[str, ...] = tuple(ACTIONS)) -> st.SearchStrategy[Program]:
    """Return the strategy of programs that use some actions."""
    number = st.integers(0, 99)
    # Without children there is little for the others to act on.
    weighted = [*names, "child", "child", "child"]
    action = st.tuples(st.sampled_from(weighted), number, number, number)
    return st.lists(action, min_size=4, max_size=16).map(tuple)


def build(program: Program, conventional: bool = False) -> nn.Module:
    """Run a program and return the root of its tree.

    A conventional tree is finished depth first: what is constructed before another
    module also stands before it, so that the tree tells the order.
    """
    tree = Tree(conventional)
    for name, a, b, c in program:
        ACTIONS[name](tree, a, b, c)
    return tree.root


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

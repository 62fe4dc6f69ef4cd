"""What a random module tree is made of: odd modules, children, values, views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

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


class Marked(nn.Parameter):
    """A Parameter of a class of its own."""


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
    "nested containers": lambda: nn.ModuleDict(
        {"a": nn.ModuleList([nn.Sequential(nn.Linear(1, 2)), nn.ModuleDict()])}
    ),
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

"""Healthy models that the audit must have nothing to say about."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations


class Case:
    """One healthy situation: models, optimizers, holders."""

    def __init__(
        self, *models: nn.Module, optimizers: Any = (), holders: Any = ()
    ) -> None:
        self.models = models
        self.optimizers = tuple(optimizers)
        self.holders = tuple(holders)


class Raising(nn.Module):
    """Its properties raise, and so does whatever it has no attribute for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    @property
    def weight(self) -> torch.Tensor:
        raise RuntimeError("not now")

    def __getattr__(self, name: str) -> Any:
        if name in ("lin", "_parameters", "_buffers", "_modules"):
            return super().__getattr__(name)
        raise RuntimeError(f"no {name}")


class Slots:
    """A plain object without a `__dict__`."""

    __slots__ = ("tensor", "unset")

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)


class Slotted(nn.Module):
    """A module with slots of its own, one of them not set."""

    __slots__ = ("table", "unset")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "table", torch.ones(2))
        self.held = Slots()


class Cyclic(nn.Module):
    """Attributes that lead back to where they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.lin.__dict__["parent"] = self
        self.loop: list[Any] = [self]
        self.loop.append(self.loop)
        self.deep: Any = None
        for _ in range(5000):
            self.deep = [self.deep]


def _tied() -> Case:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 7))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    return Case(model, optimizers=[optimizer])


def _tied_across() -> Case:
    actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    critic.weight = actor.weight
    params = {id(p): p for p in [*actor.parameters(), *critic.parameters()]}
    return Case(actor, critic, optimizers=[torch.optim.SGD(params.values(), lr=0.1)])


def _averaged() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = [p.detach().clone() for p in model.parameters()]
    own = {"params": list(model.parameters())}
    return Case(model, holders=[torch.optim.swa_utils.AveragedModel(model), ema, own])


def _parametrized() -> Case:
    plain = parametrizations.weight_norm(nn.Linear(3, 3))
    spectral = parametrizations.spectral_norm(nn.Linear(3, 3))
    orthogonal = parametrizations.orthogonal(nn.Linear(3, 3))
    rnn = parametrizations.weight_norm(nn.LSTM(3, 3), "weight_hh_l0")
    return Case(nn.ModuleList([plain, spectral, orthogonal, rnn]))


def _frozen() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False).eval()
    used = [p for p in model.parameters() if p.requires_grad]
    return Case(model, optimizers=[torch.optim.Adam(used)])


def _views() -> Case:
    model = nn.Module()
    table = torch.zeros(8)
    model.register_buffer("table", table)
    model.register_buffer("window", table[2:6])
    flat = torch.zeros(12)
    model.first = nn.Parameter(flat[:6].view(2, 3))
    model.second = nn.Parameter(flat[6:].view(2, 3))
    interleaved = torch.zeros(2, 6)
    model.left = nn.Parameter(interleaved[:, :3])
    model.right = nn.Parameter(interleaved[:, 3:])
    model.rows = model.first[:1]
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    return Case(model)


def _hooked() -> Case:
    model = nn.Linear(3, 3)
    other = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 2)
    model.bias.register_post_accumulate_grad_hook(lambda param: None)
    model.register_forward_hook(lambda *args: other.weight.sum() and None)
    model.forward = functools.partial(nn.Linear.forward, model)
    model(torch.ones(1, 3)).sum().backward()
    return Case(model)


def _compiled() -> Case:
    model = nn.Sequential(nn.Linear(3, 3))
    wrapped = torch.compile(model, backend="eager")
    wrapped(torch.ones(1, 3))
    return Case(wrapped, optimizers=[torch.optim.SGD(wrapped.parameters(), lr=0.1)])


def _two_optimizers() -> Case:
    model, loss = nn.Linear(3, 3), nn.Linear(3, 1)
    params = [*model.parameters(), *loss.parameters()]
    first = torch.optim.Adam(params)
    second = torch.optim.LBFGS(model.parameters())
    third = torch.optim.Adagrad(model.parameters())
    return Case(model, optimizers=[first, second, third])


def _dtypes() -> Case:
    model = nn.Module()
    for name in ("complex64", "int8", "uint8", "bool", "float8_e4m3fn", "bfloat16"):
        zeros = torch.zeros(5, dtype=torch.uint8)
        dtype = getattr(torch, name)
        data = zeros.view(dtype) if dtype.itemsize == 1 else zeros.to(dtype)
        model.register_buffer(f"of_{name}", data)
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("scalar", torch.tensor(1.5))
    model.half_model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
    return Case(model)


def _copied() -> Case:
    model = nn.TransformerEncoderLayer(4, 2, 8)
    return Case(copy.deepcopy(model))


def _torch_classes() -> Case:
    return Case(
        nn.ModuleList(
            [
                nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
                nn.GRU(3, 4),
                nn.MultiheadAttention(4, 2, kdim=3, vdim=3),
                nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
                nn.Conv2d(3, 4, 3),
                nn.ConvTranspose1d(3, 4, 3),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
                nn.EmbeddingBag(5, 3, padding_idx=0),
                nn.Bilinear(2, 3, 4),
                nn.PReLU(),
                nn.CrossEntropyLoss(weight=torch.ones(3)),
                nn.AdaptiveLogSoftmaxWithLoss(64, 10, [2, 5]),
                nn.FractionalMaxPool2d(2, output_ratio=0.5),
                nn.ParameterList([nn.Parameter(torch.ones(2))]),
                nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
            ]
        )
    )


HEALTHY: dict[str, Callable[[], Case]] = {
    "classes of torch.nn": _torch_classes,
    "weights tied, trained one step": _tied,
    "a tie across two models": _tied_across,
    "an averaged copy": _averaged,
    "parametrizations": _parametrized,
    "frozen and in eval mode": _frozen,
    "views and masks": _views,
    "hooks of each kind": _hooked,
    "compiled and run": _compiled,
    "several optimizers": _two_optimizers,
    "all kinds of dtype": _dtypes,
    "a deep copy": _copied,
    "properties that raise": lambda: Case(Raising()),
    "slots": lambda: Case(Slotted()),
    "cycles and depth": lambda: Case(Cyclic()),
}

"""A healthy, materialized model with all that holds its parameters, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import deferred_init as di
from deferred_init.audit import Snapshot, run_audit, take_snapshot


class Model(nn.Module):
    """Ties, views, frozen and attributed parameters, hooks, an RNN, plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4, padding_idx=0)
        self.rnn = nn.GRU(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.frozen.eval()
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.body = nn.Linear(4, 4)
        self.body.weight.tensor_model_parallel = True
        self.body.weight.owner = "me"
        self.body.weight.register_hook(_double)
        self.body.bias.register_post_accumulate_grad_hook(_nothing)
        self.body.register_forward_hook(_no_output)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("window", self.table[2:6])
        self.extra = {"scales": [torch.ones(3)]}
        self.note = "kept"


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _nothing(param: Tensor) -> None:
    pass


def _no_output(*args: Any) -> None:
    pass


@dataclass
class Situation:
    """A materialized model with all that holds its parameters."""

    model: Model
    optimizer: torch.optim.Optimizer
    holders: list[Any]
    expected: Snapshot
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def codes(self, *, snapshot: bool) -> list[str]:
        findings = run_audit(
            (self.model,),
            optimizers=(self.optimizer,),
            holders=self.holders,
            verify="full",
            expected=self.expected if snapshot else None,
            device=self.device if snapshot else None,
        )
        return [finding.code for finding in findings]


def healthy_situation() -> Situation:
    model = di.deferred_init(Model)
    optimizer = torch.optim.Adam(model.parameters())
    holders: list[Any] = [
        {"params": [p for p in model.parameters() if p.requires_grad]},
        lambda: model.body.weight,
    ]
    expected = take_snapshot((model,), optimizers=(optimizer,), holders=holders)
    di.materialize(
        model, "cpu", optimizers=optimizer, holders=holders, verify="full", seed=0
    )
    return Situation(model, optimizer, holders, expected)


Mutation = Callable[[Situation], None]


class Fault(NamedTuple):
    """What is done, the code it must yield, and whether it shows by itself."""

    code: str
    alone: bool
    mutate: Mutation


class Faults(dict[str, Fault]):
    """Faults by their names, which are those of the functions."""

    def add(self, code: str, *, alone: bool) -> Callable[[Mutation], Mutation]:
        def register(fn: Mutation) -> Mutation:
            self[fn.__name__.strip("_").replace("_", " ")] = Fault(code, alone, fn)
            return fn

        return register


def new_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)

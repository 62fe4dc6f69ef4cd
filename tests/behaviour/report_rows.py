"""Reports about other systems, by their rows; models that several of them need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import on_meta

Row = Callable[..., None]


class Rows(dict[str, Row]):
    """What checks a row, by the row's number in `reports.md` and its symptom."""

    def add(self, number: int, what: str) -> Callable[[Row], Row]:
        def keep(check: Row) -> Row:
            self[f"row {number}: {what}"] = check
            return check

        return keep


def eager(build: Callable[[], nn.Module], seed: int = 6) -> Any:
    torch.manual_seed(seed)
    return build()


def made(build: Callable[[], nn.Module], **options: Any) -> Any:
    model = on_meta(build)
    assert di.materialize(model, "cpu", seed=6, verify="full", **options).ok
    return model


def refused(model: nn.Module, pattern: str) -> None:
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(di.PlanError, match=pattern):
        di.materialize(model, "cpu", seed=6)
    assert {name: id(p) for name, p in model.named_parameters()} == before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4, padding_idx=1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight

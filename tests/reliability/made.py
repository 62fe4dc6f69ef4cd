"""Three ways to build the tree of a program: at once, recorded, on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import deferred_init as di
from tests.reliability.portrait import generators, portrait, seed
from tests.reliability.trees import Program, build

__all__ = ["eager", "on_meta", "recorded"]


def eager(
    program: Program, conventional: bool = False
) -> tuple[nn.Module, dict[str, Any], tuple[Any, ...]]:
    """Build a tree at once; return it, its portrait and the generators' states."""
    seed()
    model = build(program, conventional)
    return model, portrait(model), generators()


def recorded(program: Program) -> nn.Module:
    seed()
    before = generators()
    model = di.deferred_init(build, program)
    assert generators() == before, "recording moved a generator"
    return model


def on_meta(program: Program, conventional: bool = False) -> nn.Module:
    with torch.device("meta"):
        return build(program, conventional)

"""What the conversion to Transformer Engine is tried on, where it is installed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as te
except (ImportError, OSError):
    te = None

needs_te = pytest.mark.skipif(te is None, reason="Transformer Engine is not installed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16, eps=1e-5)
        self.odd = nn.Linear(16, 20)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


def build(kind: str) -> Any:
    if kind == "recorded":
        return di.deferred_init(Block)
    if kind == "meta":
        with torch.device("meta"):
            return Block()
    torch.manual_seed(0)
    return Block()

"""A model of torch's own layers, on meta and recorded for a GPU."""

from __future__ import annotations

import torch
from torch import nn

import deferred_init as di

WIDTH = 128


def build() -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(64, WIDTH, padding_idx=0),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 64, bias=False),
    )
    model[3].weight = model[0].weight
    model[1].requires_grad_(False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return build()


def recorded() -> nn.Module:
    with torch.device("cuda"):
        return di.deferred_init(build)

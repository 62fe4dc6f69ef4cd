"""The decoders of the scale benchmark, the largest of 702 billion parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import deferred_init as di

STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a decoder."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0


SIZES = {
    "tiny": Size(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, vocabulary=128),
    "8b": Size(
        layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocabulary=128256
    ),
    "70b": Size(
        layers=80, hidden=8192, inner=28672, heads=64, kv_heads=8, vocabulary=128256
    ),
    "405b": Size(
        layers=126, hidden=16384, inner=53248, heads=128, kv_heads=8, vocabulary=128256
    ),
    "moe256": Size(
        layers=61,
        hidden=7168,
        inner=2048,
        heads=128,
        kv_heads=128,
        vocabulary=129280,
        experts=256,
    ),
}


class Linear(nn.Linear):
    """Without a bias, drawn from a normal distribution, as large models are."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden // size.heads * size.kv_heads
        self.q = Linear(size.hidden, size.hidden)
        self.k = Linear(size.hidden, width)
        self.v = Linear(size.hidden, width)
        self.o = Linear(size.hidden, size.hidden)


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Linear(size.hidden, size.inner)
        self.up = Linear(size.hidden, size.inner)
        self.down = Linear(size.inner, size.hidden)


class Experts(nn.Module):
    """All experts of a layer in three parameters, as grouped kernels want them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = Linear(size.hidden, size.experts)
        into = (size.experts, size.inner, size.hidden)
        self.gate = nn.Parameter(torch.empty(into))
        self.up = nn.Parameter(torch.empty(into))
        self.down = nn.Parameter(torch.empty(size.experts, size.hidden, size.inner))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=STD)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.hidden)
        self.ffn = Experts(size) if size.experts else FeedForward(size)


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = Linear(size.hidden, size.vocabulary)


def build(size: Size, built: str) -> nn.Module:
    """Build the model without memory, in bfloat16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        if built == "recorded":
            return di.deferred_init(Decoder, size)
        with torch.device("meta"):
            return Decoder(size)
    finally:
        torch.set_default_dtype(default)

"""The models whose overhead is measured: a Llama's shape, built in several ways."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from llama import llama_config
from scale_models import SIZES, Decoder, Size, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deferred_init as di

WORLD, RANK = 8, 4
SHAPES = {
    "tiny": Size(layers=32, hidden=16, inner=24, heads=4, kv_heads=2, vocabulary=32),
    "3.5b": Size(
        layers=16, hidden=4096, inner=14336, heads=32, kv_heads=8, vocabulary=1024
    ),
    "8b": SIZES["8b"],
    # As many layers of the shape of 70 B as fit into the memory of one H200.
    "57b": replace(SIZES["70b"], layers=64),
}

Build = Callable[[Size, torch.device], nn.Module]


def plain(size: Size, device: torch.device) -> nn.Module:
    return build(size, "meta")


def recorded(size: Size, device: torch.device) -> nn.Module:
    return _recorded(Decoder, size, device=device)


def hf(size: Size, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        return _llama(size)


def hf_recorded(size: Size, device: torch.device) -> nn.Module:
    return _recorded(_llama, size, device=device)


def sharded(size: Size, device: torch.device) -> nn.Module:
    return _shard(plain(size, device), device)


def sharded_recorded(size: Size, device: torch.device) -> nn.Module:
    return _shard(recorded(size, device), device)


def _without_gpu(build: Build) -> Build:
    """Let constructors of Transformer Engine run where there is no GPU."""

    @functools.wraps(build)
    def built(size: Size, device: torch.device) -> nn.Module:
        importlib.import_module("transformer_engine.pytorch.ops")
        with nullcontext() if torch.cuda.is_available() else di.on_meta():
            return build(size, device)

    return built


@_without_gpu
def te(size: Size, device: torch.device) -> nn.Module:
    from transformer_engine.pytorch import TransformerLayer

    layers = [
        TransformerLayer(
            size.hidden,
            size.inner,
            size.heads,
            num_gqa_groups=size.kv_heads,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device="meta",
        )
        for _ in range(size.layers)
    ]
    return nn.Sequential(*layers)


@_without_gpu
def te_ops(size: Size, device: torch.device) -> nn.Module:
    from transformer_engine.pytorch import ops

    qkv = size.hidden + 2 * size.hidden * size.kv_heads // size.heads
    shapes = (
        *((size.hidden, qkv), (size.hidden, size.hidden)),
        *((size.hidden, 2 * size.inner), (size.inner, size.hidden)),
    )
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    layers = [
        ops.Sequential(
            ops.RMSNorm(size.hidden, **kwargs),
            *(ops.Linear(*shape, bias=False, **kwargs) for shape in shapes),
            ops.RMSNorm(size.hidden, **kwargs),
        )
        for _ in range(size.layers)
    ]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Build, str | None]] = {
    "plain": (plain, None),
    "recorded": (recorded, None),
    "hf": (hf, None),
    "hf-recorded": (hf_recorded, None),
    "sharded": (sharded, None),
    "sharded-recorded": (sharded_recorded, None),
    "te": (te, None),
    "te-ops": (te_ops, None),
    "te-fp8": (te, "fp8_current"),
    "te-ops-fp8": (te_ops, "fp8_current"),
}


def possible(case: str, device: torch.device) -> bool:
    """Whether what a case needs is here."""
    if case.startswith("hf"):
        return find_spec("transformers") is not None
    if case.startswith("te"):
        runs = device.type == "cuda" or not case.endswith("fp8")
        return find_spec("transformer_engine") is not None and runs
    return True


def _recorded(make: Any, size: Size, *, device: torch.device) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return di.deferred_init(make, size)
    finally:
        torch.set_default_dtype(default)


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaForCausalLM

    config = llama_config(size, dtype="bfloat16")
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def _shard(model: nn.Module, device: torch.device) -> nn.Module:
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    mesh = init_device_mesh(device.type, (WORLD,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

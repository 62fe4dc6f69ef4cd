"""Saving, loading and going on: what the tests of FP8 checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from one_rank import shard
from te_models import BF16, RECIPES, WIDTH, build, forward_backward, ops_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import AdamW

import deferred_init as di
from deferred_init.te.probe import fp8_state_manager, is_quantized

te = pytest.importorskip("transformer_engine.pytorch")
FP8 = [name for name in RECIPES if name != "bf16"]
Make = Callable[[int], nn.Module]
# DCP's own is no Exception.
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, AttributeError)
FAILURES += (AssertionError, OSError, CheckpointException)


def two_modules(device: str) -> nn.Module:
    shared: dict[str, Any] = {"device": device, "params_dtype": BF16}
    return nn.Sequential(
        te.LayerNormMLP(WIDTH, 2 * WIDTH, **shared),
        te.Linear(WIDTH, WIDTH, bias=False, **shared),
    )


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "modules": two_modules,
    "ops": lambda device: ops_model("nested", device),
}


def from_meta(kind: str, te_recipe: Any, *, sharded: bool) -> Make:
    def make(seed: int) -> nn.Module:
        model = build(lambda: MODELS[kind]("meta"), te_recipe)
        if sharded:
            shard(model)
        di.materialize(model, "cuda", seed=seed)
        return model

    return make


def eager(kind: str, te_recipe: Any, *, sharded: bool) -> Make:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = build(lambda: MODELS[kind]("cuda"), te_recipe)
        return shard(model) if sharded else model

    return make


def local_part(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def train_on(
    model: nn.Module, optimizer: AdamW, te_recipe: Any, steps: range
) -> list[Tensor]:
    """Train; return all outputs, gradients and, in the end, parameters."""
    seen: list[Tensor] = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        seen.append(forward_backward(model, te_recipe, step))
        for param in model.parameters():
            assert param.grad is not None
            seen.append(local_part(param.grad).detach().clone())
        optimizer.step()
    for param in model.parameters():
        part = local_part(param).detach()
        seen.append(part.dequantize() if is_quantized(part) else part.clone())
    return seen


Save = Callable[[nn.Module, AdamW, Path], None]
Load = Callable[[nn.Module, AdamW, Path, Any], None]


def resume(
    make: Make,
    te_recipe: Any,
    save: Save,
    load: Load,
    folder: Path,
    optimizer_for: Callable[[nn.Module], Any] = optimizer_of,
) -> tuple[str, list[Tensor]]:
    """Train, save and go on; load into another model and go on there.

    Returns:
        How it went, and everything seen after loading.
    """
    model = make(0)
    optimizer = optimizer_for(model)
    try:
        train_on(model, optimizer, te_recipe, range(2))
        save(model, optimizer, folder)
        expected = train_on(model, optimizer, te_recipe, range(2, 4))
        fp8_state_manager().reset()
        other = make(1)
        its_optimizer = optimizer_for(other)
        load(other, its_optimizer, folder, te_recipe)
        seen = train_on(other, its_optimizer, te_recipe, range(2, 4))
    except FAILURES as error:
        return f"{type(error).__name__}: {str(error)[:200]}", []
    finally:
        fp8_state_manager().reset()
    pairs = list(zip(seen, expected, strict=True))
    wrong = [number for number, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return f"{wrong} of {len(pairs)} differ" if wrong else "resumes bit for bit", seen


def sized_as_stored(state: dict[str, Any], folder: Path, prefix: str = "") -> None:
    """Give entries of extra state the size that they have in the checkpoint.

    A fresh model's are empty, and DCP loads into tensors of equal size only.
    """
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in list(state):
        if name.endswith("_extra_state"):
            size = stored[f"{prefix}{name}"].size
            state[name] = torch.empty(size, dtype=torch.uint8)

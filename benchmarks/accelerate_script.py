"""One training script in three variants; `accelerate_table.py` launches it.

`deferred` builds the model without memory and lets the plugin prepare it; `eager`
builds it on the device and lets the plugin convert it; `accelerate` is the script
without this library: built on the CPU, converted by accelerate, if it can. The last
line that it prints is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits twice

import accelerate
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deferred_init as di
from deferred_init.integrations.accelerate_plugin import (
    Accelerator,
    DeferredInitPlugin,
)

# hidden, intermediate, layers, heads, key-value heads, vocabulary: Llama 3.2, 1 B.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
}
BATCH, LENGTH, STEPS = 1, 512, 3


class Clock:
    """Seconds of each stage since the parent process started this one."""

    def __init__(self, started: float) -> None:
        self._last = started
        self.seconds: dict[str, float] = {}

    def stage(self, name: str) -> None:
        """End a stage; work on the device counts to the stage that asked for it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now


def build(shape: str, tied: bool) -> nn.Module:
    """Construct the model as its users do."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def make(way: str, construct: Callable[[], nn.Module], device: Any) -> nn.Module:
    """Construct the model in one of the three ways."""
    if way == "deferred":
        model: nn.Module = di.deferred_init(construct)
        return model
    torch.manual_seed(0)
    with device if way == "eager" else contextlib.nullcontext():
        return construct()


def accelerator_for(way: str, recipe: str) -> Any:
    """Return an accelerator; the launcher has chosen precision and sharding."""
    if way != "accelerate":
        name = None if recipe == "bf16" else recipe
        return Accelerator(deferred_init=DeferredInitPlugin(recipe=name, seed=0))
    if recipe == "bf16":
        return accelerate.Accelerator()
    from accelerate.utils import TERecipeKwargs

    return accelerate.Accelerator(kwargs_handlers=[TERecipeKwargs()])


def watch_precision(model: nn.Module) -> list[bool]:
    """Note, at each forward of the first projection, whether it computes in FP8."""
    seen: list[bool] = []
    library = sys.modules.get("transformer_engine.pytorch")

    def look(module: nn.Module, _: Any) -> None:
        fp8 = False
        if library is not None:
            state = library.quantization.FP8GlobalStateManager
            converted = type(module).__module__.startswith("transformer_engine")
            fp8 = converted and bool(state.is_fp8_enabled())
        seen.append(fp8)

    name = "model.layers.0.self_attn.q_proj"
    names = dict(model.named_modules())
    found = next(module for key, module in names.items() if key.endswith(name))
    found.register_forward_pre_hook(look)
    return seen


def host_bytes() -> int:
    """Return the most host memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(accelerator: Any, model: Any, optimizer: Any, clock: Clock) -> list[float]:
    """Take the steps; the losses."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = accelerator.unwrap_model(model).config.vocab_size
    losses: list[float] = []
    for number in range(STEPS):
        ids = torch.randint(vocabulary, (BATCH, LENGTH), generator=generator)
        ids = ids.to(accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.stage(f"step {number + 1}")
    return losses


def main() -> None:
    """Build, prepare, train; print what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("deferred", "eager", "accelerate"))
    parser.add_argument("--recipe")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--started", type=float)
    arguments = parser.parse_args()
    clock = Clock(arguments.started)
    torch.use_deterministic_algorithms(True, warn_only=True)

    accelerator = accelerator_for(arguments.way, arguments.recipe)
    torch.zeros(1, device=accelerator.device)
    if arguments.recipe != "bf16":
        import transformer_engine.pytorch  # noqa: F401
    clock.stage("start")
    before = host_bytes()
    model = make(
        arguments.way,
        lambda: build(arguments.shape, not arguments.untied),
        accelerator.device,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    clock.stage("build")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    clock.stage("prepare")
    growth = host_bytes() - before
    fp8 = watch_precision(prepared)
    ours = {id(parameter) for parameter in prepared.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    losses = train(accelerator, prepared, optimizer, clock)
    result = {
        "parameters": count,
        "trained": sum(parameter in held for parameter in ours),
        "tensors": len(ours),
        "fp8": fp8,
        "losses": losses,
        "bits": [loss.hex() for loss in losses],
        "seconds": clock.seconds,
        "host_growth_bytes": growth,
        "device_peak_bytes": torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else 0,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    accelerator.end_training()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""One training script in three variants; `accelerate_table.py` launches it.

`deferred` builds the model without memory and lets the plugin prepare it; `eager`
builds it on the device and lets the plugin convert it, and `eager_again` does the same
once more; `accelerate` is the script without this library: built on the CPU, converted
by accelerate, if it can. All cases run in one process. None pays for what a process
does once (kernels that are compiled or loaded, heuristics, modules that are imported):
before the first, each is run on a model of one layer, which has the widths of the
measured one, so that the same kernels are met; accelerate's own on a tiny one, since
the kernels are the same and a CPU is slow. Everything is deterministic by torch's
strict setting, under which an operation that cannot be is an error; so equal values
have to give equal bits. It prints a JSON object per case. With `--construct` it only
constructs the model of the last variant, ahead.
"""

# ruff: noqa: E402 - what is imported first decides which cuDNN there is
from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

# The same bits twice. Both are read when their libraries start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import torch

te: Any = None
if "--construct" not in sys.argv:
    try:
        # After torch, which brings libraries that it needs, and before torch loads
        # cuDNN: where there are two of them, both want to be first.
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        print(f"Transformer Engine cannot be imported: {error}", flush=True)

import accelerate
from torch import nn
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deferred_init as di
from benchmarks.accelerate_meters import (
    GPU,
    Clock,
    HostPeak,
    turn,
    values_of,
    versions,
)
from benchmarks.llama import llama_config
from benchmarks.scale_models import Size
from deferred_init.integrations.accelerate_plugin import (
    Accelerator,
    DeferredInitPlugin,
)

LLAMA_1B = Size(  # Llama 3.2's
    layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8, vocabulary=128256
)
SHAPES = {
    "tiny": Size(layers=2, hidden=64, inner=128, heads=4, kv_heads=2, vocabulary=256),
    "layer": replace(LLAMA_1B, layers=1),
    "1b": LLAMA_1B,
}
BATCH, LENGTH, STEPS = 1, 512, 3


def construct(shape: str, tied: bool) -> nn.Module:
    """Construct a Llama, where the context says."""
    options = {"tie_word_embeddings": tied, "use_cache": False}
    config = llama_config(SHAPES[shape], **options)
    return LlamaForCausalLM(config)


def construct_ahead(file: Path, shape: str, tied: bool) -> None:
    """Construct on the CPU, and keep the model with the seconds that it took."""
    torch.manual_seed(0)
    started = time.perf_counter()
    model = construct(shape, tied)
    seconds = time.perf_counter() - started
    part = file.with_suffix(".part")
    torch.save({"model": model, "seconds": seconds}, part)
    part.rename(file)


def wait_for(file: Path, patience_s: float = 90.0) -> None:
    """Wait for the model that another process constructs."""
    started = time.perf_counter()
    while not file.exists() and time.perf_counter() - started < patience_s:
        time.sleep(0.1)


def build(way: str, options: argparse.Namespace, device: Any, clock: Clock) -> Any:
    """Make the model as the variant does."""
    tied = not options.untied
    if way == "deferred":
        model: Any = di.deferred_init(construct, options.shape, tied)
    elif way == "accelerate" and options.original is not None:
        kept = torch.load(options.original, weights_only=False)
        clock.stage("load")  # in the place of `build`, which another process did
        clock.seconds["build"] = kept["seconds"]
        return kept["model"]
    else:
        torch.manual_seed(0)
        with torch.device("cpu") if way == "accelerate" else device:
            model = construct(options.shape, tied)
    clock.stage("build")
    return model


def accelerator_for(way: str, recipe: str, precision: str | None) -> Any:
    """Return an accelerator; the launcher has chosen the sharding."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    mixed = precision or ("bf16" if recipe == "bf16" else "fp8")
    if way != "accelerate":
        plugin = DeferredInitPlugin(recipe=None if recipe == "bf16" else recipe, seed=0)
        return Accelerator(mixed_precision=mixed, deferred_init=plugin)
    handlers = [] if recipe == "bf16" else [accelerate.utils.TERecipeKwargs()]
    return accelerate.Accelerator(mixed_precision=mixed, kwargs_handlers=handlers)


def watch_precision(model: nn.Module) -> list[bool]:
    """Note, at each forward of the first projection, whether it computes in FP8."""
    seen: list[bool] = []

    def look(module: nn.Module, _: Any) -> None:
        converted = type(module).__module__.startswith("transformer_engine")
        seen.append(converted and _fp8_is_on())

    name = "model.layers.0.self_attn.q_proj"
    modules = dict(model.named_modules())
    found = next(module for key, module in modules.items() if key.endswith(name))
    found.register_forward_pre_hook(look)
    return seen


def _fp8_is_on() -> bool:
    on = te is not None and te.quantization.FP8GlobalStateManager.is_fp8_enabled()
    return bool(on)


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


def case(way: str, recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Build, prepare, train; what happened."""
    accelerator = accelerator_for(way, recipe, options.precision)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    with HostPeak() as host:
        clock = Clock()
        model: Any = build(way, options, accelerator.device, clock)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        clock.stage("optimizer")
        model, optimizer = accelerator.prepare(model, optimizer)
        clock.stage("prepare")
    start = values_of(model)
    fp8 = watch_precision(model)
    ours = {id(parameter): parameter.numel() for parameter in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    clock.stage("looked at")
    losses = train(accelerator, model, optimizer, clock)
    result = {
        "parameters": sum(ours.values()),
        "tensors": len(ours),
        "trained": sum(parameter in held for parameter in ours),
        "fp8": fp8,
        "losses": losses,
        "bits": [start, *(loss.hex() for loss in losses), values_of(model)],
        "seconds": clock.seconds,
        "host_growth_bytes": host.growth,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if GPU else 0,
    }
    accelerator.free_memory()
    return result


def attempt(way: str, recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case; its failure is a result too."""
    try:
        result = case(way, recipe, options)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        text = traceback.format_exc()
        result = {"error": f"{type(error).__name__}: {error}", "traceback": text}
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    return {"way": way, "recipe": recipe, "tied": not options.untied} | result


def warm_up(cases: list[list[str]], options: argparse.Namespace) -> None:
    """Run each case small; nobody measures meanwhile, but others may warm up too."""
    with turn(options.lock, shared=True):
        for way, recipe in cases:
            if way == "eager_again":
                continue
            shape = "tiny" if way == "accelerate" else "layer"
            small = {**vars(options), "shape": shape, "original": None}
            row = attempt(way, recipe, argparse.Namespace(**small))
            print(f"warm-up {way} {recipe}: {row.get('error', 'done')}", flush=True)


def main() -> None:
    """Warm up, then run the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", nargs="+", default=[], help="WAY:RECIPE")
    parser.add_argument("--shape", choices=("tiny", "1b"), default="tiny")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--precision")
    parser.add_argument("--lock", type=Path, help="measure while holding this file")
    parser.add_argument("--original", type=Path, help="what `--construct` writes")
    parser.add_argument("--construct", type=Path)
    options = parser.parse_args()
    if options.construct is not None:
        construct_ahead(options.construct, options.shape, not options.untied)
        return
    # Strict: with a warning instead of an error, attention would not be deterministic.
    torch.use_deterministic_algorithms(True)
    cases = [name.split(":") for name in options.case]
    if options.shape != "tiny":
        warm_up(cases, options)
    found = versions()
    for way, recipe in cases:
        if way == "accelerate" and options.original is not None:
            wait_for(options.original)
        with turn(options.lock):
            row = attempt(way, recipe, options)
        print(json.dumps(row | {"versions": found}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""One training script in three variants; `accelerate_table.py` launches it.

`deferred` builds the model without memory and lets the plugin prepare it; `eager`
builds it on the device and lets the plugin convert it; `accelerate` is the script
without this library: built on the CPU, converted by accelerate, if it can. All cases
run in one process, after a small one of each kind to warm up. It prints a JSON object
per case.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import threading
import time
import traceback
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
GPU = torch.cuda.is_available()


class HostPeak:
    """The most memory of this process while the context is open, in bytes."""

    def __enter__(self) -> HostPeak:
        gc.collect()
        self.before = self.peak = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _resident_bytes())

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, _resident_bytes())

    @property
    def growth(self) -> int:
        """Return what was added to the memory at the start."""
        return self.peak - self.before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Clock:
    """Seconds of each stage, with the work on the device that it asked for."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def stage(self, name: str) -> None:
        """End a stage."""
        if GPU:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


class Way:
    """How the script makes its model; what takes long on the CPU is done once."""

    def __init__(self, name: str, shape: str, tied: bool) -> None:
        self.name = name
        self._shape, self._tied = shape, tied
        self._original: Any = None
        self._seconds = 0.0

    def model(self, device: torch.device, clock: Clock) -> Any:
        """Construct the model, or copy the one that was constructed on the CPU."""
        if self.name == "deferred":
            model: Any = di.deferred_init(self._construct)
            clock.stage("build")
            return model
        if self.name == "eager":
            torch.manual_seed(0)
            with device:
                model = self._construct()
            clock.stage("build")
            return model
        model = copy.deepcopy(self._original)
        clock.stage("copy")
        clock.seconds["build"] = self._seconds
        return model

    def construct_ahead(self) -> None:
        """Construct on the CPU, if that is the way, once for all cases."""
        if self.name == "accelerate" and self._original is None:
            torch.manual_seed(0)
            started = time.perf_counter()
            self._original = self._construct()
            self._seconds = time.perf_counter() - started

    def _construct(self) -> nn.Module:
        hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[self._shape]
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=self._tied,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def accelerator(self, recipe: str, precision: str | None) -> Any:
        """Return an accelerator; the launcher has chosen the sharding."""
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        mixed = precision or ("bf16" if recipe == "bf16" else "fp8")
        if self.name != "accelerate":
            plugin = DeferredInitPlugin(
                recipe=None if recipe == "bf16" else recipe, seed=0
            )
            return Accelerator(mixed_precision=mixed, deferred_init=plugin)
        handlers = []
        if recipe != "bf16":
            handlers.append(accelerate.utils.TERecipeKwargs())
        return accelerate.Accelerator(mixed_precision=mixed, kwargs_handlers=handlers)


def watch_precision(model: nn.Module) -> list[bool]:
    """Note, at each forward of the first projection, whether it computes in FP8."""
    seen: list[bool] = []
    library = sys.modules.get("transformer_engine.pytorch")

    def look(module: nn.Module, _: Any) -> None:
        converted = type(module).__module__.startswith("transformer_engine")
        on = library is not None and _fp8_is_on(library)
        seen.append(converted and on)

    name = "model.layers.0.self_attn.q_proj"
    modules = dict(model.named_modules())
    found = next(module for key, module in modules.items() if key.endswith(name))
    found.register_forward_pre_hook(look)
    return seen


def _fp8_is_on(library: Any) -> bool:
    return bool(library.quantization.FP8GlobalStateManager.is_fp8_enabled())


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


def case(way: Way, recipe: str, precision: str | None) -> dict[str, Any]:
    """Build, prepare, train; what happened."""
    way.construct_ahead()
    accelerator = way.accelerator(recipe, precision)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    with HostPeak() as host:
        model: Any = way.model(accelerator.device, clock)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        clock.stage("optimizer")
        model, optimizer = accelerator.prepare(model, optimizer)
        clock.stage("prepare")
    fp8 = watch_precision(model)
    ours = {id(parameter): parameter.numel() for parameter in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    losses = train(accelerator, model, optimizer, clock)
    accelerator.free_memory()
    return {
        "parameters": sum(ours.values()),
        "tensors": len(ours),
        "trained": sum(parameter in held for parameter in ours),
        "fp8": fp8,
        "losses": losses,
        "bits": [loss.hex() for loss in losses],
        "seconds": clock.seconds,
        "host_growth_bytes": host.growth,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if GPU else 0,
    }


def attempt(way: Way, recipe: str, precision: str | None) -> dict[str, Any]:
    """Run a case; its failure is a result too."""
    try:
        result = case(way, recipe, precision)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        text = traceback.format_exc()
        result = {"error": f"{type(error).__name__}: {error}", "traceback": text}
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    return result


def main() -> None:
    """Warm up, then run the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", nargs="+")
    parser.add_argument("--recipe", nargs="+")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--precision")
    arguments = parser.parse_args()
    if any(recipe != "bf16" for recipe in arguments.recipe):
        # Before torch loads cuDNN: where there are two of them, both want to be first.
        import transformer_engine.pytorch  # noqa: F401
    torch.use_deterministic_algorithms(True, warn_only=True)
    shapes = ["tiny"] if arguments.shape == "tiny" else ["tiny", arguments.shape]
    for shape in shapes:
        for name in arguments.way:
            way = Way(name, shape, not arguments.untied)
            for recipe in arguments.recipe:
                if name == "accelerate" and recipe not in ("bf16", "fp8_delayed"):
                    continue  # of Hopper's recipes it knows one
                result = attempt(way, recipe, arguments.precision)
                row = {"way": name, "recipe": recipe, "tied": not arguments.untied}
                if shape == arguments.shape:
                    print(json.dumps(row | result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the scripts of this folder share: arguments, the plan, and the real work."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.errors import DeferredInitError
from deferred_init.hardware import GPUS
from deferred_init.integrations.te_conversion import convert_to_te

__all__ = ["NEEDS_OTHER_HARDWARE", "run"]

NEEDS_OTHER_HARDWARE = 77
"""The exit code that says so."""

Build = Callable[[], nn.Module]


def run(
    sizes: Mapping[str, Build],
    layers: str,
    argv: Sequence[str] | None = None,
    *,
    convert: bool = True,
) -> int:
    """Plan or materialize one of several sizes.

    Args:
        sizes: Constructors by size; the first is the small one, and the default.
        layers: Name of the list of layers, each of which becomes a unit of FSDP2.
        argv: The command line; None takes that of the process.
        convert: Whether a recipe of Transformer Engine turns the layers into its own,
            which compute in its format and keep their weights in high precision.

    Returns:
        The exit code: 1 if the request cannot be carried out.
    """
    arguments = _parse(sizes, argv)
    build = sizes[arguments.size]
    try:
        if arguments.recipe is not None:
            arguments.recipe = di.Recipe.load(arguments.recipe)
            arguments.convert = convert and arguments.recipe.te_recipe is not None
        if arguments.convert:
            arguments.recipe = replace(arguments.recipe, quantize_weights=False)
        if arguments.plan:
            return _print_plan(build, arguments)
        return _make(build, layers, arguments)
    except DeferredInitError as error:
        print(error, file=sys.stderr)
        return 1


def _parse(
    sizes: Mapping[str, Build], argv: Sequence[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(sizes), default=next(iter(sizes)))
    parser.add_argument("--recipe", help="a recipe's name, file, or several with +")
    parser.add_argument("--plan", action="store_true", help="print the plan and stop")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    parser.add_argument("--world-size", type=int, default=1, help="ranks to plan for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write a seed checkpoint (DCP) here")
    parser.set_defaults(convert=False)
    return parser.parse_args(argv)


def _convert(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Turn the layers into those of Transformer Engine, if the recipe is for them.

    They compute in its format and keep their weights in high precision.
    """
    if not arguments.convert:
        return
    if arguments.plan and find_spec("transformer_engine") is None:
        print("Transformer Engine is not installed; this plan is for torch's layers")
        return
    print(convert_to_te(model))


def _print_plan(build: Build, arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    # On meta rather than recorded: a plan needs no values, and this is faster.
    with _on_meta():
        model = build()
    _convert(model, arguments)
    plan = di.plan(
        model,
        "cuda",
        arguments.recipe,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    print(plan)
    print(f"{count:,} parameters, planned in {time.perf_counter() - started:.1f} s")
    return 0


def _make(build: Build, layers: str, arguments: argparse.Namespace) -> int:
    device = _join()
    if device.type == "cpu" and "transformer_engine" in sys.modules:
        # Without a GPU its layers cannot be recorded, but built on meta and made.
        with _on_meta():
            model = build()
    else:
        model = di.deferred_init(build, device=device)
    _convert(model, arguments)
    # Weights that are stored quantized are made before they are sharded.
    quantized = arguments.recipe is not None and arguments.recipe.quantize_weights
    if not quantized:
        _shard(model, layers, device)
    report = di.materialize(model, device, arguments.recipe, seed=arguments.seed)
    if quantized:
        _shard(model, layers, device)
    if arguments.save is not None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=arguments.save)
    if _rank() == 0:
        print(report)
        if arguments.save is not None:
            print(f"seed checkpoint: {arguments.save}, for any number of ranks")
    if dist.is_initialized():
        # gloo's threads let go of the last tensors a moment after the collective:
        # Python must not be ending by then, or torch aborts.
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()
    return 0


def _on_meta() -> AbstractContextManager[object]:
    if "transformer_engine" in sys.modules:
        from deferred_init.te.on_meta import on_meta

        return on_meta()
    return torch.device("meta")


def _join() -> torch.device:
    """Join the process group of torchrun, where there is one."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if "RANK" in os.environ:
        if kind == "cuda":
            device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _shard(model: nn.Module, layers: str, device: torch.device) -> None:
    if not dist.is_initialized():
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_submodule(layers).children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

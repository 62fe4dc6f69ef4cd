"""`deferred-init plan`: what `materialize` would do."""

from __future__ import annotations

import argparse
from typing import Any, Final

from deferred_init.commands.arguments import (
    RECIPE,
    add_rng,
    add_target,
    positive,
    usable_device,
)
from deferred_init.hardware import GPUS

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = (
    "say what materialize would do with the model that a function builds; needs "
    "neither memory nor a GPU"
)
EXAMPLE: Final = (
    "deferred-init plan my_project.model:build --gpu h200 --world-size 8 "
    "--recipe fp8_current"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target, and the hardware to plan for."""
    add_target(parser)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--recipe", help=RECIPE)
    add_rng(parser)
    parser.add_argument(
        "--gpu",
        type=str.lower,
        choices=sorted(GPUS),
        help="plan for this GPU, which need not be here; exit code 1 if the recipe "
        "cannot run on it or the model does not fit",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        default=1,
        metavar="N",
        help="ranks over which FSDP2 will shard the parameters; default: 1",
    )


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Plan; a model that does not fit is not well.

    Raises:
        TargetError: The target or the device cannot be used, or a GPU is named with
            another device.
        PlanError: Something cannot be made.
    """
    from deferred_init.api import plan
    from deferred_init.target import TargetError, build_deferred, built, load_target

    device = usable_device(arguments.device)
    if arguments.gpu and device.type != "cuda":
        raise TargetError(f"--gpu needs --device cuda, found {arguments.device}")
    models, optimizers = built(build_deferred(load_target(arguments.target)))
    the_plan = plan(
        models,
        device,
        arguments.recipe,
        optimizers=optimizers,
        rng=arguments.rng,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
    )
    fits = the_plan.forecast().fits is not False
    return fits, {"ok": fits, **the_plan.to_dict()}, str(the_plan)

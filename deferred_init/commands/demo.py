"""`deferred-init demo`: the main job on a real model."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from deferred_init.commands.arguments import positive, usable_device

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = (
    "build GPT-2 (124 M parameters) without memory, materialize it, compare it with "
    "eager construction, and train it"
)
EXAMPLE: Final = "deferred-init demo --device cpu --steps 3"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where it runs and how much it does."""
    parser.add_argument("--device", help="default: a GPU when there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    for name, default in (("steps", 3), ("batch", 1), ("seq", 64)):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"default: {default}"
        )


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Run the demo; its words appear while it runs, with JSON on standard error.

    Raises:
        TargetError: The device does not exist.
        PlanError: transformers is not installed.
    """
    from deferred_init.demo import DemoOptions, run_demo

    if arguments.device is not None:
        usable_device(arguments.device, must_exist=True)
    options = DemoOptions(
        device=arguments.device,
        seed=arguments.seed,
        num_steps=arguments.steps,
        batch_size=arguments.batch,
        sequence_length=arguments.seq,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr if arguments.json else sys.stdout)

    result = run_demo(options, say)
    return bool(result["ok"]), result, ""

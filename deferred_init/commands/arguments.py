"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["RECIPE", "add_rng", "add_target", "positive", "usable_device"]

RECIPE: Final = "a recipe's name, file, or several with +"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says which model is meant."""
    parser.add_argument(
        "target",
        help="package.module:function: the module is imported and the function called "
        "without arguments, so their code runs with your rights; or a Hugging Face "
        "folder or config.json, of which the configuration is read and nothing else",
    )


def add_rng(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says where random numbers come from."""
    from deferred_init.rng import POLICIES

    parser.add_argument(
        "--rng",
        choices=POLICIES,
        default=POLICIES[0],
        help=f"where random values come from; default: {POLICIES[0]}",
    )


def positive(text: str) -> int:
    """Read an integer of at least 1.

    Raises:
        ArgumentTypeError: It is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def usable_device(text: str, *, must_exist: bool = False) -> torch.device:
    """Read what `--device` says.

    Args:
        text: A device as torch writes it.
        must_exist: Whether this machine has to have it.

    Raises:
        TargetError: There is no such device, or it has no memory.
    """
    import torch

    from deferred_init.errors import PlanError
    from deferred_init.target import TargetError
    from deferred_init.validate import resolve_device

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise TargetError(
            f"--device takes cpu, cuda, cuda:1 and the like, found {text!r}"
        ) from error
    try:
        return resolve_device(device, must_exist)
    except (PlanError, ValueError) as error:
        raise TargetError(f"--device {text}: {error}") from error

"""`deferred-init materialize`: a seed checkpoint from a constructor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from deferred_init.commands.arguments import RECIPE, add_rng, add_target, usable_device
from deferred_init.seed_checkpoint import FORMATS

if TYPE_CHECKING:
    from torch import nn

    from deferred_init.report import Report

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = (
    "make the model that a function builds, and save it as a seed checkpoint"
)
EXAMPLE: Final = "deferred-init materialize my_project.model:build --out seed --seed 0"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target, how it is made, and where it is saved."""
    add_target(parser)
    parser.add_argument("--out", required=True, help="a folder, new or empty")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--recipe", help=RECIPE)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_rng(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help=f"default: {FORMATS[0]}; with transformers' models also their config.json",
    )
    parser.add_argument("--report", help="save the report: .html, .json, .txt or .png")


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Make the model and save it.

    Raises:
        TargetError: The target, the device, the folder or the report's file cannot be
            used, or the report is to be a picture and nothing was made.
    """
    from deferred_init.api import materialize
    from deferred_init.report import usable_report_file
    from deferred_init.seed_checkpoint import save_seed_checkpoint, usable_folder
    from deferred_init.target import TargetError, build_deferred, built, load_target

    device = usable_device(arguments.device, must_exist=True)
    try:
        folder = usable_folder(arguments.out)
        if arguments.report:
            usable_report_file(arguments.report, also_in=folder)
    except ValueError as error:
        raise TargetError(str(error)) from error
    models, optimizers = built(build_deferred(load_target(arguments.target)))
    if len(models) > 1:
        raise TargetError(f"a seed checkpoint holds one model, found {len(models)}")
    report = materialize(
        models,
        device,
        arguments.recipe,
        optimizers=optimizers,
        seed=arguments.seed,
        rng=arguments.rng,
    )
    _check_picture(arguments.report, report, models[0])
    files = save_seed_checkpoint(models[0], folder, arguments.format)
    if arguments.report:
        report.save(arguments.report)
    said = f"{report}\nsaved {', '.join(files)} in {folder}"
    return report.ok, {**report.to_dict(), "files": list(files)}, said


def _check_picture(path: str | None, report: Report, model: nn.Module) -> None:
    from deferred_init.target import TargetError

    if path and path.endswith(".png") and not report.steps:
        raise TargetError(
            f"--report {path}: {type(model).__name__} has no deferred tensor, so there "
            "is no curve to draw; take .html, .json or .txt"
        )

"""`deferred-init audit`: what is wrong with a model."""

from __future__ import annotations

import argparse
from typing import Any, Final

from deferred_init.commands.arguments import add_target

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = (
    "say what is wrong with the model that a function returns, alone or together with "
    "its optimizers"
)
EXAMPLE: Final = "deferred-init audit my_project.train:model_and_optimizer"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the target, and how much is read."""
    add_target(parser)
    parser.add_argument(
        "--verify",
        choices=("fast", "full"),
        default="fast",
        help="full also reads all values; default: fast",
    )


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """Audit what the target returns.

    Raises:
        TargetError: The target cannot be used.
    """
    from deferred_init.audit_verb import audit
    from deferred_init.target import built, load_target

    models, optimizers = built(load_target(arguments.target)())
    report = audit(models, optimizers=optimizers, verify=arguments.verify)
    return report.ok, report.to_dict(), str(report)

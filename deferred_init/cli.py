"""The command line: `deferred-init`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

from deferred_init.commands import (
    audit,
    bench,
    demo,
    doctor,
    materialize,
    plan,
    recipes,
)
from deferred_init.errors import DeferredInitError

__all__ = ["main"]

_EXIT_CODES: Final = (
    "exit codes: 0, all is well; 1, something is wrong with the model or the request; "
    "2, the command line is wrong"
)


class Command(Protocol):
    """What a module of `deferred_init.commands` offers."""

    @property
    def DESCRIPTION(self) -> str:
        """What it does, as the sentence of `--help`."""

    @property
    def EXAMPLE(self) -> str:
        """A command line that parses."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what the command takes besides `--json`."""

    def run(self, arguments: argparse.Namespace) -> tuple[bool, Any, str]:
        """Return whether all is well, the result as plain data, and in words."""


# In the order in which `--help` lists them.
_COMMANDS: Final[dict[str, Command]] = {
    "demo": demo,
    "plan": plan,
    "materialize": materialize,
    "bench": bench,
    "audit": audit,
    "recipes": recipes,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 if all is well; 1 if something is wrong with the model or the
        request; 2 if something is wrong with the command line.
    """
    from deferred_init.target import TargetError

    arguments = _parser().parse_args(argv)
    try:
        ok, data, said = _COMMANDS[arguments.command].run(arguments)
    except TargetError as error:
        print(f"deferred-init: {error}", file=sys.stderr)
        return 2
    except DeferredInitError as error:
        if arguments.json:
            problems = list(getattr(error, "problems", ()))
            _print_json({"ok": False, "error": str(error), "problems": problems})
        else:
            print(f"deferred-init: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        _print_json(data)
    elif said:
        print(said)
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deferred-init",
        description="Turn a model that was built without memory into a correct, "
        "verified, trainable one.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        what = command.DESCRIPTION
        subparser = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {command.EXAMPLE}\n\n{_EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.add_argument("--json", action="store_true", help="print JSON")
        command.add_options(subparser)
    return parser


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))

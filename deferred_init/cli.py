"""The command line: `deferred-init`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deferred_init.commands import bench, materialize
from deferred_init.commands.arguments import TARGET, positive
from deferred_init.errors import DeferredInitError
from deferred_init.hardware import GPUS
from deferred_init.recipe import Recipe, preset_names

__all__ = ["main"]

_EXIT_CODES = (
    "exit codes: 0, all is well; 1, something is wrong with the model or the request; "
    "2, the command line is wrong"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 if all is well; 1 if something is wrong with the model or the
        request; 2 if something is wrong with the command line.
    """
    from deferred_init.target import TargetError

    arguments = _parser().parse_args(argv)
    try:
        ok: bool = arguments.run(arguments)
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
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deferred-init",
        description="Turn a model that was built without memory into a correct, "
        "verified, trainable one.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    _add_materialize(commands)
    _add_bench(commands)
    _add_audit(commands)
    _add_recipes(commands)
    _command(
        commands,
        "doctor",
        _run_doctor,
        "say what is installed, which GPU there is, and what is wrong with either",
        "deferred-init doctor",
    )
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], bool],
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=f"example:\n  {example}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        _run_demo,
        "build GPT-2 (124 M parameters) without memory, materialize it, compare it "
        "with eager construction, and train it",
        "deferred-init demo --device cpu --steps 3",
    )
    parser.add_argument("--device", help="default: a GPU when there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    for name, default in (("steps", 3), ("batch", 1), ("seq", 64)):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"default: {default}"
        )


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        _run_plan,
        "say what materialize would do with the model that a function builds; needs "
        "neither memory nor a GPU",
        "deferred-init plan my_project.model:build --gpu h200 --world-size 8 "
        "--recipe fp8_current",
    )
    parser.add_argument("target", help=TARGET)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--recipe", help="a recipe's name, file, or several with +")
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


def _add_materialize(commands: Any) -> None:
    parser = _command(
        commands,
        "materialize",
        partial(_run_told, materialize.run),
        "make the model that a function builds, and save it as a seed checkpoint",
        "deferred-init materialize my_project.model:build --out seed --seed 0",
    )
    parser.add_argument("target", help=TARGET)
    materialize.add_options(parser)


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        partial(_run_told, bench.run),
        "time a constructor, eagerly and deferred, side by side",
        "deferred-init bench my_project.model:build --device cuda",
    )
    parser.add_argument("target", help=TARGET)
    bench.add_options(parser)


def _add_audit(commands: Any) -> None:
    parser = _command(
        commands,
        "audit",
        _run_audit,
        "say what is wrong with the model that a function returns, alone or together "
        "with its optimizers",
        "deferred-init audit my_project.train:model_and_optimizer",
    )
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--verify",
        choices=("fast", "full"),
        default="fast",
        help="full also reads all values; default: fast",
    )


def _add_recipes(commands: Any) -> None:
    parser = _command(
        commands,
        "recipes",
        _run_recipes,
        "list the recipes that come with the package, or explain one",
        "deferred-init recipes fp8_current+gpt2",
    )
    parser.add_argument(
        "recipe", nargs="?", help="a recipe's name, file, or several with +"
    )


def _run_demo(arguments: argparse.Namespace) -> bool:
    from deferred_init.demo import DemoOptions, run_demo

    options = DemoOptions(
        device=arguments.device,
        seed=arguments.seed,
        num_steps=arguments.steps,
        batch_size=arguments.batch,
        sequence_length=arguments.seq,
    )
    say = (lambda text: print(text, file=sys.stderr)) if arguments.json else print
    result = run_demo(options, say)
    if arguments.json:
        _print_json(result)
    return bool(result["ok"])


def _run_plan(arguments: argparse.Namespace) -> bool:
    from deferred_init.api import plan
    from deferred_init.target import TargetError, build_deferred, built, load_target

    if arguments.gpu and torch.device(arguments.device).type != "cuda":
        raise TargetError(f"--gpu needs --device cuda, found {arguments.device}")
    models, optimizers = built(build_deferred(load_target(arguments.target)))
    the_plan = plan(
        models,
        arguments.device,
        arguments.recipe,
        optimizers=optimizers,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
    )
    fits = the_plan.forecast().fits is not False
    if arguments.json:
        _print_json({"ok": fits, **the_plan.to_dict()})
    else:
        print(the_plan)
    return fits


def _run_told(
    run: Callable[[argparse.Namespace], tuple[dict[str, Any], str]],
    arguments: argparse.Namespace,
) -> bool:
    """Run a command that returns its result both as data and in words."""
    result, said = run(arguments)
    if arguments.json:
        _print_json(result)
    else:
        print(said)
    return bool(result["ok"])


def _run_audit(arguments: argparse.Namespace) -> bool:
    from deferred_init.api import audit
    from deferred_init.target import built, load_target

    models, optimizers = built(load_target(arguments.target)())
    report = audit(models, optimizers=optimizers, verify=arguments.verify)
    if arguments.json:
        _print_json(report.to_dict())
    else:
        print(report)
    return bool(report.ok)


def _run_doctor(arguments: argparse.Namespace) -> bool:
    from deferred_init.doctor import diagnose, diagnosis_text

    diagnosis = diagnose()
    if arguments.json:
        _print_json(diagnosis)
    else:
        print(diagnosis_text(diagnosis))
    return bool(diagnosis["ok"])


def _run_recipes(arguments: argparse.Namespace) -> bool:
    from deferred_init.recipe_text import explanation, recipe_dict

    names = preset_names() if arguments.recipe is None else (arguments.recipe,)
    recipes = [Recipe.load(name) for name in names]
    if arguments.json:
        _print_json([recipe_dict(recipe) for recipe in recipes])
    elif arguments.recipe is None:
        for recipe in recipes:
            print(f"{recipe.name:<12} {recipe.description}")
        print("\nJoin several with +; `deferred-init recipes NAME` explains one.")
    else:
        print(explanation(recipes[0]))
    return True


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))

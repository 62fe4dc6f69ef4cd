"""Read and write recipes as TOML.

The functions here speak of the fields of a `Recipe` as a dict, so that the class can
use them without either importing the other. A file holds data only: nothing in it is
imported or evaluated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from deferred_init.dtype_policy import DTYPES, DtypePolicy
from deferred_init.errors import PlanError
from deferred_init.init_rules import InitRule
from deferred_init.init_sizes import InitSizes
from deferred_init.spelling import closest
from deferred_init.te_recipe import TERecipeSpec

__all__ = ["fields_from_toml", "toml_from_fields"]

_FLAGS: Final = ("quantize_weights", "keep_high_precision_init", "inference")
_TEXTS: Final = ("name", "description")
_TOP: Final = (
    *_TEXTS,
    *_FLAGS,
    "high_precision_modules",
    "te_recipe",
    "dtype",
    "init",
)
_DTYPE_KINDS: Final = tuple(DtypePolicy.__dataclass_fields__)
_SIZES: Final = tuple(InitSizes.__dataclass_fields__)
_RULE_FIELDS: Final = ("match", "distribution", "min_ndim", "scale_by")


def fields_from_toml(text: str, *, source: str) -> dict[str, Any]:
    """Parse TOML into keyword arguments of `Recipe`.

    Args:
        text: The TOML document.
        source: Where it came from, for messages.

    Raises:
        PlanError: It is not TOML, or it holds unknown keys or bad values; all of
            them are listed.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise PlanError(f"{source} is not a recipe: it is nested too deeply") from None
    except ValueError as error:  # `TOMLDecodeError`, or a number of too many digits
        raise PlanError(f"{source} is not valid TOML: {error}") from error
    problems: list[str] = []
    _check_keys(document, _TOP, "", problems)
    found: dict[str, Any] = {}
    for key in _TEXTS:
        _take(document, key, str, "a string", found, problems)
    for key in _FLAGS:
        _take(document, key, bool, "true or false", found, problems)
    if "name" not in document:
        problems.append("`name` is missing")
    _read_modules(document, found, problems)
    _read_te_recipe(_table(document, "te_recipe", problems), found, problems)
    _read_dtypes(_table(document, "dtype", problems), found, problems)
    _read_init(_table(document, "init", problems), found, problems)
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise PlanError(f"{count} in {source}: " + "; ".join(problems), problems)
    return found


def _check_keys(
    table: Mapping[str, Any], known: tuple[str, ...], where: str, problems: list[str]
) -> None:
    for key in table:
        if key not in known:
            problems.append(f"unknown key `{where}{key}`; {closest(key, known)}")


def _take(
    table: Mapping[str, Any],
    key: str,
    kind: type,
    expected: str,
    found: dict[str, Any],
    problems: list[str],
) -> None:
    if key not in table:
        return
    if type(table[key]) is kind:
        found[key] = table[key]
    else:
        problems.append(f"`{key}` must be {expected}, found {table[key]!r}")


def _table(parent: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    table = parent.get(key, {})
    if isinstance(table, dict):
        return table
    problems.append(f"`{key}` must be a table, found {table!r}")
    return {}


def _build(
    make: Callable[[], Any], where: str, problems: list[str], default: Any = None
) -> Any:
    """Run a constructor and file what it refuses under the problems."""
    try:
        return make()
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return default


def _read_modules(
    document: Mapping[str, Any], found: dict[str, Any], problems: list[str]
) -> None:
    patterns = document.get("high_precision_modules", [])
    if isinstance(patterns, list) and all(type(each) is str for each in patterns):
        found["high_precision_modules"] = tuple(patterns)
    else:
        problems.append(
            f"`high_precision_modules` must be a list of strings, found {patterns!r}"
        )


def _read_te_recipe(
    table: Mapping[str, Any], found: dict[str, Any], problems: list[str]
) -> None:
    if not table:
        return
    _check_keys(table, ("name", "options"), "te_recipe.", problems)
    name = table.get("name")
    if type(name) is not str:
        problems.append("`te_recipe.name` must name a TE recipe class")
        return
    options = tuple(_table(table, "options", problems).items())
    found["te_recipe"] = _build(
        lambda: TERecipeSpec(name=name, options=options), "te_recipe", problems
    )


def _read_dtypes(
    table: Mapping[str, Any], found: dict[str, Any], problems: list[str]
) -> None:
    _check_keys(table, _DTYPE_KINDS, "dtype.", problems)
    chosen = {}
    for kind in _DTYPE_KINDS:
        name = table.get(kind)
        if name is None:
            continue
        if type(name) is str and name in DTYPES:
            chosen[kind] = DTYPES[name]
        else:
            problems.append(f"`dtype.{kind}` is {name!r}; {closest(str(name), DTYPES)}")
    found["dtype"] = DtypePolicy(**chosen)


def _read_init(
    table: Mapping[str, Any], found: dict[str, Any], problems: list[str]
) -> None:
    _check_keys(table, ("sizes", "rules"), "init.", problems)
    sizes = _table(table, "sizes", problems)
    _check_keys(sizes, _SIZES, "init.sizes.", problems)
    known = {key: value for key, value in sizes.items() if key in _SIZES}
    found["init_sizes"] = _build(
        lambda: InitSizes(**known), "init.sizes", problems, InitSizes()
    )
    rules = table.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(r, dict) for r in rules):
        problems.append("`init.rules` must be an array of tables: [[init.rules]]")
        return
    built = [_read_rule(rule, index, problems) for index, rule in enumerate(rules)]
    found["init_rules"] = tuple(rule for rule in built if rule is not None)


def _read_rule(
    table: Mapping[str, Any], index: int, problems: list[str]
) -> InitRule | None:
    where = f"init.rules[{index}]"
    required = ("match", "distribution")
    absent = [key for key in required if type(table.get(key)) is not str]
    if absent:
        problems += [f"`{where}.{key}` must be a string" for key in absent]
        return None
    own = {key: table[key] for key in _RULE_FIELDS if key in table}
    options = tuple((k, v) for k, v in table.items() if k not in _RULE_FIELDS)
    rule: InitRule | None = _build(
        lambda: InitRule(**own, options=options), where, problems
    )
    return rule


def toml_from_fields(recipe: Mapping[str, Any]) -> str:
    """Write the fields of a `Recipe` as TOML; defaults are left out.

    Raises:
        ValueError: A live TE recipe holds settings that plain data cannot express.
    """
    lines = [f"name = {_literal(recipe['name'])}"]
    if recipe["description"]:
        lines.append(f"description = {_literal(recipe['description'])}")
    lines += [f"{key} = true" for key in _FLAGS if recipe[key]]
    if recipe["high_precision_modules"]:
        patterns = list(recipe["high_precision_modules"])
        lines.append(f"high_precision_modules = {_literal(patterns)}")
    lines += _te_recipe_lines(recipe["te_recipe"])
    names = {dtype: name for name, dtype in DTYPES.items()}
    dtypes = {kind: getattr(recipe["dtype"], kind) for kind in _DTYPE_KINDS}
    lines += _table_lines("dtype", {k: names[v] for k, v in dtypes.items() if v})
    sizes = {key: getattr(recipe["init_sizes"], key) for key in _SIZES}
    lines += _table_lines("init.sizes", {k: v for k, v in sizes.items() if v})
    for rule in recipe["init_rules"]:
        own = {key: getattr(rule, key) for key in _RULE_FIELDS}
        lines += ["", "[[init.rules]]"]
        lines += [f"{k} = {_literal(v)}" for k, v in own.items() if v not in (None, 0)]
        lines += [f"{key} = {_literal(value)}" for key, value in rule.options]
    return "\n".join(lines) + "\n"


def _te_recipe_lines(spec: TERecipeSpec | None) -> list[str]:
    if spec is None:
        return []
    unwritable = spec.unwritable_options()
    if unwritable:
        raise ValueError(
            f"a live `{spec.name}` cannot be written as TOML: "
            f"{', '.join(f'`{each}`' for each in unwritable)} is not plain data"
        )
    head = _table_lines("te_recipe", {"name": spec.name})
    return head + _table_lines("te_recipe.options", dict(spec.options))


def _table_lines(header: str, table: Mapping[str, Any]) -> list[str]:
    if not table:
        return []
    return ["", f"[{header}]", *(f"{k} = {_literal(v)}" for k, v in table.items())]


def _literal(value: Any) -> str:
    # JSON's strings, booleans, numbers and lists are TOML as well, but for the DEL
    # character, which JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

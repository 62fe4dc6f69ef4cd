"""Describe a Transformer Engine recipe without importing Transformer Engine.

A `TERecipeSpec` is data: the name of a recipe class and its options. It can be read
from TOML, compared and printed on a machine that has no Transformer Engine, and it
becomes the real object only in `TERecipeSpec.make`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from deferred_init.errors import PlanError
from deferred_init.spelling import closest

__all__ = ["TERecipeSpec", "is_te_recipe"]

Option = bool | int | str

_BOOL: Final = (True, False)
_BLOCK_DIM: Final = (1, 2)
_FP8_FORMAT: Final = ("E4M3", "HYBRID")
_BACKWARD: Final = ("high_precision", "dequantized")
_SCOPE: Final = ("none", "weights", "activations", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of one recipe class.

    `options` maps an option to its allowed values; None stands for any integer.
    Options that Transformer Engine reads from its class, not from the instance
    (`use_power_2_scales`), are left out: setting them would change nothing.
    """

    kind: str
    min_compute_capability: tuple[int, int]
    below_compute_capability: tuple[int, int] | None = None
    options: dict[str, tuple[Option, ...] | None]


def _known(
    kind: str,
    least: tuple[int, int],
    below: tuple[int, int] | None = None,
    **options: tuple[Option, ...] | None,
) -> _Known:
    return _Known(
        kind=kind,
        min_compute_capability=least,
        below_compute_capability=below,
        options=options,
    )


# Read from `transformer_engine/common/recipe/__init__.py` and the support checks in
# `transformer_engine/pytorch/quantization.py` of release 2.20.2.
_KNOWN: Final = MappingProxyType(
    {
        "DelayedScaling": _known(
            "delayed",
            (8, 9),
            margin=None,
            fp8_format=_FP8_FORMAT,
            amax_history_len=None,
            amax_compute_algo=("max", "most_recent"),
            reduce_amax=_BOOL,
            fp8_dpa=_BOOL,
            fp8_mha=_BOOL,
        ),
        "Float8CurrentScaling": _known(
            "current",
            (8, 9),
            fp8_format=_FP8_FORMAT,
            fp8_dpa=_BOOL,
            fp8_mha=_BOOL,
            backward_override=_BACKWARD,
        ),
        "Float8BlockScaling": _known(
            "block",
            (9, 0),
            fp8_format=_FP8_FORMAT,
            x_block_scaling_dim=_BLOCK_DIM,
            w_block_scaling_dim=_BLOCK_DIM,
            grad_block_scaling_dim=_BLOCK_DIM,
            backward_override=_BACKWARD,
        ),
        "MXFP8BlockScaling": _known(
            "mxfp8",
            (10, 0),
            (12, 0),
            margin=None,
            fp8_format=_FP8_FORMAT,
            backward_override=_BACKWARD,
            enable_2d_quantization=_BOOL,
        ),
        "NVFP4BlockScaling": _known(
            "nvfp4",
            (10, 0),
            disable_rht=_BOOL,
            disable_stochastic_rounding=_BOOL,
            disable_2d_quantization=_BOOL,
            row_scaled_activation=_BOOL,
            nvfp4_4over6=_SCOPE,
            backward_override=_BACKWARD,
        ),
    }
)


def is_te_recipe(value: object) -> bool:
    """Say whether a value is a Transformer Engine recipe, by where its class lives."""
    return any(
        cls.__module__.startswith("transformer_engine") and cls.__name__ == "Recipe"
        for cls in type(value).__mro__
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TERecipeSpec:
    """A Transformer Engine recipe: the class by name, and its options.

    Args:
        name: A class of `transformer_engine.common.recipe`.
        options: Keyword arguments of that class, as sorted pairs.
        instance: A live recipe object that `make` hands back as it is.

    Raises:
        ValueError: An unknown class, option or value; all are listed.
    """

    name: str
    options: tuple[tuple[str, Option], ...] = ()
    instance: object | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        if self.instance is not None:
            return
        problems = _problems(self.name, dict(self.options))
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def from_te_recipe(cls, te_recipe: object) -> TERecipeSpec:
        """Describe a live recipe object, keeping the object itself.

        Raises:
            TypeError: The object is no Transformer Engine recipe.
        """
        if not is_te_recipe(te_recipe):
            raise TypeError(
                f"expected a Transformer Engine recipe, found `{type(te_recipe)}`"
            )
        name = _known_name(te_recipe)
        options = {} if name is None else _changed_options(te_recipe, name)[0]
        return cls(
            name=name or type(te_recipe).__name__,
            options=tuple(options.items()),
            instance=te_recipe,
        )

    @property
    def kind(self) -> str:
        """One of delayed, current, block, mxfp8, nvfp4 or custom."""
        known = _KNOWN.get(self.name)
        return "custom" if known is None else known.kind

    @property
    def min_compute_capability(self) -> tuple[int, int] | None:
        """The least CUDA compute capability that runs it; None when not known."""
        known = _KNOWN.get(self.name)
        return None if known is None else known.min_compute_capability

    def unsupported_reason(self, compute_capability: tuple[int, int]) -> str | None:
        """Say why a GPU of this compute capability cannot run it; None if it can."""
        known = _KNOWN.get(self.name)
        if known is None:
            return None
        found = "{}.{}".format(*compute_capability)
        least = known.min_compute_capability
        if compute_capability < least:
            return (
                f"`{self.name}` needs compute capability {least[0]}.{least[1]} or "
                f"higher, found {found}"
            )
        below = known.below_compute_capability
        if below is not None and compute_capability >= below:
            return (
                f"`{self.name}` does not run on compute capability {below[0]}."
                f"{below[1]} or higher yet, found {found}"
            )
        return None

    def unwritable_options(self) -> tuple[str, ...]:
        """Name the settings of a live recipe that plain data cannot express."""
        if self.instance is None:
            return ()
        if self.name not in _KNOWN:
            return (self.name,)
        return _changed_options(self.instance, self.name)[1]

    def make(self) -> Any:
        """Import Transformer Engine and build the recipe object.

        Raises:
            PlanError: Transformer Engine is not installed, or the installed release
                lacks the class or an option.
        """
        if self.instance is not None:
            return self.instance
        try:
            from transformer_engine.common import recipe as te_recipes
        except ImportError as error:
            raise PlanError(
                f"the recipe `{self.name}` needs Transformer Engine, which could not "
                f"be imported ({error}); `deferred-init doctor` says what is missing"
            ) from error
        te_class = getattr(te_recipes, self.name, None)
        if te_class is None:
            raise PlanError(
                f"the installed Transformer Engine has no `{self.name}`; install a "
                "newer release or choose another recipe"
            )
        options: dict[str, Any] = dict(self.options)
        if "fp8_format" in options:
            options["fp8_format"] = te_recipes.Format[options["fp8_format"]]
        try:
            return te_class(**options)
        except (TypeError, ValueError, AssertionError) as error:
            raise PlanError(
                f"the installed Transformer Engine refuses `{self.name}` with "
                f"{options}: {error}"
            ) from error


def _problems(name: str, options: dict[str, Option]) -> list[str]:
    known = _KNOWN.get(name)
    if known is None:
        return [f"no TE recipe class `{name}`; {closest(name, _KNOWN)}"]
    found = []
    for key, value in options.items():
        if key not in known.options:
            hint = closest(key, known.options)
            found.append(f"`{name}` has no option `{key}`; {hint}")
        elif not _allowed(value, known.options[key]):
            values = known.options[key]
            expected = "an integer" if values is None else f"one of {list(values)}"
            found.append(f"`{name}.{key}` must be {expected}, found {value!r}")
    return found


def _allowed(value: Option, values: tuple[Option, ...] | None) -> bool:
    # `True == 1` in Python, so the type is compared as well as the value.
    if values is None:
        return type(value) is int
    return any(type(value) is type(each) and value == each for each in values)


def _known_name(te_recipe: object) -> str | None:
    names = (cls.__name__ for cls in type(te_recipe).__mro__)
    return next((name for name in names if name in _KNOWN), None)


def _changed_options(
    te_recipe: Any, name: str
) -> tuple[dict[str, Option], tuple[str, ...]]:
    """Split what differs from the class's defaults into writable and unwritable."""
    default = type(te_recipe)()
    options: dict[str, Option] = {}
    unwritable: list[str] = []
    for each in dataclasses.fields(te_recipe):
        value = getattr(te_recipe, each.name)
        if each.name.startswith("_") or value == getattr(default, each.name):
            continue
        plain = value.name if each.name == "fp8_format" else value
        allowed = _KNOWN[name].options
        if each.name in allowed and _allowed(plain, allowed[each.name]):
            options[each.name] = plain
        else:
            unwritable.append(each.name)
    return options, tuple(unwritable)

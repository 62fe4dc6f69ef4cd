"""Initialization rules: which distribution fills the tensors of which names.

A rule is data. `InitRule.initializer` turns it into a function of a tensor. Where a
scheme depends on the model (depth, width), the rule names one of the expressions in
`init_sizes.EXPRESSIONS`; nothing is ever evaluated as code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from deferred_init.init_sizes import EXPRESSIONS, InitSizes
from deferred_init.spelling import closest

__all__ = ["DISTRIBUTIONS", "InitRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distribution:
    fill: Callable[..., Any]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    """Options that `scale_by` multiplies."""


_KAIMING: Final = ("a", "mode", "nonlinearity")

DISTRIBUTIONS: Final = MappingProxyType(
    {
        "normal": _Distribution(
            fill=nn.init.normal_, required=("std",), optional=("mean",), scaled=("std",)
        ),
        "trunc_normal": _Distribution(
            fill=nn.init.trunc_normal_,
            required=("std",),
            optional=("mean", "a", "b"),
            scaled=("std",),
        ),
        "uniform": _Distribution(
            fill=nn.init.uniform_, required=("a", "b"), scaled=("a", "b")
        ),
        "constant": _Distribution(
            fill=nn.init.constant_, required=("val",), scaled=("val",)
        ),
        "zeros": _Distribution(fill=nn.init.zeros_),
        "ones": _Distribution(fill=nn.init.ones_),
        "xavier_uniform": _Distribution(
            fill=nn.init.xavier_uniform_, optional=("gain",), scaled=("gain",)
        ),
        "xavier_normal": _Distribution(
            fill=nn.init.xavier_normal_, optional=("gain",), scaled=("gain",)
        ),
        "kaiming_uniform": _Distribution(
            fill=nn.init.kaiming_uniform_, optional=_KAIMING
        ),
        "kaiming_normal": _Distribution(
            fill=nn.init.kaiming_normal_, optional=_KAIMING
        ),
    }
)

_TEXT_OPTIONS: Final = MappingProxyType(
    {
        "mode": ("fan_in", "fan_out"),
        "nonlinearity": ("leaky_relu", "linear", "relu", "selu", "sigmoid", "tanh"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Fill every tensor whose qualified name matches with one distribution.

    Args:
        match: Glob on the qualified name (`*` also spans dots).
        min_ndim: Least number of dimensions of a tensor to match; 2 leaves biases
            and norm weights to their modules, whatever they are called.
        distribution: A key of `DISTRIBUTIONS`; options are named as in
            `torch.nn.init`.
        options: Arguments of the distribution as pairs; `std` may be an expression
            of `EXPRESSIONS` by name.
        scale_by: An expression by name, multiplied into the spread.

    Raises:
        ValueError: An unknown name or a bad value; all are listed.
    """

    match: str
    distribution: str
    min_ndim: int = 0
    options: tuple[tuple[str, float | str], ...] = ()
    scale_by: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    def matches(self, fqn: str, ndim: int) -> bool:
        """Say whether the rule speaks about a tensor of this name and rank."""
        return ndim >= self.min_ndim and fnmatchcase(fqn, self.match)

    def needs(self) -> tuple[str, ...]:
        """Name the sizes without which the rule cannot be applied."""
        used = [value for _, value in self.options if value in EXPRESSIONS]
        used += [] if self.scale_by is None else [self.scale_by]
        needed = {size for name in used for size in EXPRESSIONS[str(name)].needs}
        return tuple(sorted(needed))

    def initializer(self, sizes: InitSizes) -> Callable[[Tensor], None]:
        """Make the function that fills a tensor in place.

        It draws from the default generator of the tensor's device, and it changes
        neither `requires_grad` nor the tensor's identity.

        Raises:
            ValueError: A size that the rule needs is not set.
        """
        missing = [name for name in self.needs() if getattr(sizes, name) is None]
        if missing:
            raise ValueError(
                f"the rule for `{self.match}` needs {', '.join(missing)}; set it "
                "under [init.sizes]"
            )
        distribution = DISTRIBUTIONS[self.distribution]
        arguments = self._arguments(sizes)

        @torch.no_grad()
        def fill(tensor: Tensor) -> None:
            distribution.fill(tensor, **arguments)

        return fill

    def _arguments(self, sizes: InitSizes) -> dict[str, float | str]:
        size = {each.name: getattr(sizes, each.name) for each in fields(sizes)}
        arguments: dict[str, float | str] = {}
        for name, value in self.options:
            expression = EXPRESSIONS.get(value) if isinstance(value, str) else None
            arguments[name] = value if expression is None else expression.value(size)
        if self.scale_by is None:
            return arguments
        factor = EXPRESSIONS[self.scale_by].value(size)
        for name in DISTRIBUTIONS[self.distribution].scaled:
            # `gain` is the only scaled option with a default, and that is 1.
            arguments[name] = float(arguments.get(name, 1.0)) * factor
        return arguments


def _problems(rule: InitRule) -> list[str]:
    if type(rule.min_ndim) is not int or rule.min_ndim < 0:
        return [f"`min_ndim` must be an integer of at least 0, found {rule.min_ndim!r}"]
    distribution = DISTRIBUTIONS.get(rule.distribution)
    if distribution is None:
        hint = closest(rule.distribution, DISTRIBUTIONS)
        return [f"no distribution `{rule.distribution}`; {hint}"]
    given = dict(rule.options)
    known = [*distribution.required, *distribution.optional]
    found = [
        f"`{rule.distribution}` has no option `{name}`; {closest(name, known)}"
        if known
        else f"`{rule.distribution}` takes no options, found `{name}`"
        for name in given
        if name not in known
    ]
    found += [
        f"`{rule.distribution}` needs `{name}`"
        for name in distribution.required
        if name not in given
    ]
    for name, value in given.items():
        if name in known:
            found += _value_problems(name, value)
    if rule.scale_by is not None:
        found += _scale_problems(rule, distribution)
    return found


def _value_problems(name: str, value: float | str) -> list[str]:
    texts = _TEXT_OPTIONS.get(name)
    if texts is not None:
        good = value in texts
        return [] if good else [f"`{name}` must be one of {texts}, found {value!r}"]
    if isinstance(value, str):
        if name == "std" and value in EXPRESSIONS:
            return []
        hint = closest(value, EXPRESSIONS) if name == "std" else "give a number"
        return [f"`{name}` is {value!r}, which is no expression; {hint}"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        return [f"`{name}` must be a finite number, found {value!r}"]
    if name == "std" and value < 0:
        return [f"`std` must not be negative, found {value!r}"]
    return []


def _scale_problems(rule: InitRule, distribution: _Distribution) -> list[str]:
    if not distribution.scaled:
        return [f"`{rule.distribution}` has no spread for `scale_by` to multiply"]
    if str(rule.scale_by) not in EXPRESSIONS:
        hint = closest(str(rule.scale_by), EXPRESSIONS)
        return [f"no expression `{rule.scale_by}` for `scale_by`; {hint}"]
    return []

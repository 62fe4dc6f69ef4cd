"""The sizes of a model that initialization depends on, and expressions of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from torch import nn

__all__ = ["EXPRESSIONS", "Expression", "InitSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSizes:
    """The sizes of a model that an initialization scheme may depend on.

    Args:
        num_layers: Number of residual blocks.
        hidden_size: Width of the residual stream.
        base_hidden_size: Width at which the scheme was tuned (mup).
    """

    num_layers: int | None = None
    hidden_size: int | None = None
    base_hidden_size: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and (type(value) is not int or value <= 0):
                raise ValueError(
                    f"`{each.name}` must be a positive integer, found {value!r}"
                )

    @classmethod
    def of(cls, model: nn.Module) -> InitSizes:
        """Read the sizes from `model.config` where it follows Hugging Face's names."""
        config = getattr(model, "config", None)
        found = {
            ours: getattr(config, theirs, None)
            for ours, theirs in (
                ("num_layers", "num_hidden_layers"),
                ("hidden_size", "hidden_size"),
            )
        }
        return cls(**{k: v for k, v in found.items() if type(v) is int and v > 0})

    def over(self, other: InitSizes) -> InitSizes:
        """Take each size from here, or from `other` where it is not set here."""
        return InitSizes(
            **{
                each.name: getattr(self, each.name) or getattr(other, each.name)
                for each in fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A factor of a scheme, which recipes ask for by its text.

    Attributes:
        needs: The sizes that go into it, as `InitSizes` names them.
        value: Computes it of a dict of those sizes.
    """

    needs: tuple[str, ...]
    value: Callable[[dict[str, int]], float]


EXPRESSIONS: Final = MappingProxyType(
    {
        "1/sqrt(2*num_layers)": Expression(
            needs=("num_layers",),
            value=lambda size: 1 / math.sqrt(2 * size["num_layers"]),
        ),
        "1/sqrt(num_layers)": Expression(
            needs=("num_layers",),
            value=lambda size: 1 / math.sqrt(size["num_layers"]),
        ),
        "1/sqrt(hidden_size)": Expression(
            needs=("hidden_size",),
            value=lambda size: 1 / math.sqrt(size["hidden_size"]),
        ),
        "sqrt(2/(5*hidden_size))": Expression(
            needs=("hidden_size",),
            value=lambda size: math.sqrt(2 / (5 * size["hidden_size"])),
        ),
        "2/(num_layers*sqrt(hidden_size))": Expression(
            needs=("num_layers", "hidden_size"),
            value=lambda size: (
                2 / (size["num_layers"] * math.sqrt(size["hidden_size"]))
            ),
        ),
        "sqrt(base_hidden_size/hidden_size)": Expression(
            needs=("base_hidden_size", "hidden_size"),
            value=lambda size: math.sqrt(
                size["base_hidden_size"] / size["hidden_size"]
            ),
        ),
    }
)

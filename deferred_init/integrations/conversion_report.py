"""What to convert to Transformer Engine, and what was converted; values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deferred_init.errors import listing

__all__ = ["Conversion", "ConversionReport", "Converted", "unrecorded_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to convert.

    Attributes:
        linear: Whether to convert `nn.Linear`.
        norms: Whether to convert `nn.LayerNorm`, `nn.RMSNorm` and modules of other
            packages that compute exactly that.
        include: Patterns of qualified names, as in a shell; a layer has to match one.
        exclude: Patterns of layers to leave alone.
        multiple_of: What both dimensions of a linear layer have to be multiples of:
            16 for FP8, 32 for MXFP8.
    """

    linear: bool = True
    norms: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    multiple_of: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """One layer: its name, its class before, and its class after or why not."""

    fqn: str
    before: str
    after: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What `convert_to_te` did.

    Attributes:
        converted: The layers that were replaced.
        left: The layers of a kind that is converted which were not, and why.
        unrecorded: Converted layers on meta that no recording can fill: they get
            Transformer Engine's own initial values, not those of the old class.
    """

    converted: tuple[Converted, ...]
    left: tuple[Converted, ...]
    unrecorded: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line per layer that was left alone, and the count of the others."""
        lines = [
            f"{len(self.converted)} layers converted to Transformer Engine, "
            f"{len(self.left)} left alone"
        ]
        lines += [f"  {item.fqn} ({item.before}): {item.reason}" for item in self.left]
        if self.unrecorded:
            lines.append(f"  {unrecorded_text(self.unrecorded)}")
        return "\n".join(lines)


def unrecorded_text(names: Sequence[str]) -> str:
    """Say which layers get other initial values than their constructor's."""
    return (
        f"{len(names)} layers are on meta without a recording: {listing(names)}. They "
        "get Transformer Engine's own initial values unless `weights=` has others; "
        "build the model inside `deferred_init(...)` to get those of its constructor"
    )

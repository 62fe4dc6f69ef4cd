"""What a fill draws from: parameters, and the constants that are computed once.

[Note: A truncated normal by its inverse]
Each 32-bit word gives one value, with no rejection. Near zero as in the tails the
probability that is inverted is that of the side: words below `split` are of the side
below the mean, and `q` runs from the edge of that side to the middle; words above count
down from 2**32 and `q` runs in the same way on the other side. So both tails have the
precision of small floats. With `w = -ln(4 q (1 - q))` the quantile is `(1 - 2 q) g(w)`,
as in M. Giles, "Approximating the erfinv function" (2010); `g` is a rational function
of `sqrt(1 + w)`, fitted here to a relative error of 8e-6 for `q` from 1e-20 to 1/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Distribution", "Normal", "TruncatedNormal", "Uniform"]

_WORDS = 2.0**32
_FARTHEST_EDGE = 5.0


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal values."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform values from `low`, included, to `high`, excluded."""

    low: float = 0.0
    high: float = 1.0

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the least and the greatest value of a dtype that may come out."""
        least = _round_up(self.low, dtype)
        greatest = _round_down(self.high, dtype)
        if greatest >= self.high:
            greatest = _neighbour(greatest, -math.inf, dtype)
        return (least, greatest) if least <= greatest else (self.low, self.low)


@dataclass(frozen=True, slots=True)
class TruncatedNormal:
    """Normal values on condition that they lie between `low` and `high`."""

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    @property
    def supported(self) -> bool:
        """Whether the inverse is precise here: an edge may be 5 std off the mean."""
        if not (self.std > 0 and self.low < self.high):
            return False
        start, end = self._edges()
        near = start < _FARTHEST_EDGE and end > -_FARTHEST_EDGE
        return near and sum(_shares(start, end)) > 0.0

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the least and the greatest value of a dtype that may come out."""
        least, greatest = _round_up(self.low, dtype), _round_down(self.high, dtype)
        return (least, greatest) if least <= greatest else (self.low, self.low)

    def sides(self) -> Sides:
        """Compute how words map to probabilities."""
        start, end = self._edges()
        spread = self.std
        if end <= 0:  # all of it below the mean: mirrored
            start, end, spread = -end, -start, -spread
        below, above = _shares(start, end)
        # At least one word is of the side above, however narrow that is.
        split = min(round(_WORDS * below / (below + above)), int(_WORDS) - 1)
        return Sides(
            spread=spread,
            split=split,
            below=_tail(-start) if split else 0.5,
            below_step=below / split if split else 0.0,
            above=_tail(end),
            above_step=above / (_WORDS - split),
        )

    def _edges(self) -> tuple[float, float]:
        """The bounds in standard deviations from the mean."""
        return (self.low - self.mean) / self.std, (self.high - self.mean) / self.std


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """How a word of 32 bits becomes the probability of a tail.

    Attributes:
        spread: The standard deviation, negative if the two sides are exchanged.
        split: Words below it are of the side below the mean.
        below: Probability beyond the edge of the side below.
        below_step: What each word of that side adds.
        above: Probability beyond the edge of the other side.
        above_step: What each word of it adds, counted from the last word down.
    """

    spread: float
    split: int
    below: float
    below_step: float
    above: float
    above_step: float


Distribution = Normal | Uniform | TruncatedNormal


def _shares(start: float, end: float) -> tuple[float, float]:
    """The probabilities of what lies below the mean, and above, between two edges."""
    if end <= 0:
        start, end = -end, -start
    below = max(0.5 - _tail(-start), 0.0)
    return below, _tail(max(start, 0.0)) - _tail(end)


def _tail(edge: float) -> float:
    """The probability that a normal value lies beyond an edge."""
    return 0.5 * math.erfc(edge / math.sqrt(2.0))


def _round_up(value: float, dtype: torch.dtype) -> float:
    rounded = _rounded(value, dtype)
    return rounded if rounded >= value else _neighbour(rounded, math.inf, dtype)


def _round_down(value: float, dtype: torch.dtype) -> float:
    rounded = _rounded(value, dtype)
    return rounded if rounded <= value else _neighbour(rounded, -math.inf, dtype)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def _neighbour(value: float, towards: float, dtype: torch.dtype) -> float:
    """The next value of a dtype."""
    here = torch.tensor(value, dtype=dtype, device="cpu")
    if dtype == torch.float32:
        return float(torch.nextafter(here, torch.tensor(towards, device="cpu")))
    # Of one sign, the bits of floats are in the order of their values.
    if value == 0.0:
        bits = torch.tensor(1, dtype=torch.int16, device="cpu").view(dtype)
        return math.copysign(float(bits), towards)
    step = 1 if (towards > value) == (value > 0) else -1
    return float((here.view(torch.int16) + step).view(dtype))

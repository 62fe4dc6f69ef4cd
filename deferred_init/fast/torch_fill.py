"""The fill in torch's own operations: for devices without Triton, and as the measure.

[Note: The same values on every machine]
Only operations are used whose result IEEE 754 fixes (+, -, *, /, square root), and
integers. So values depend neither on the processor, nor on the number of threads, nor
on where a block begins; a library's logarithm may differ in its last bit between the
vectorized middle and the end of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.philox import ROUNDS, Key, philox
from deferred_init.fast.window import Window

__all__ = ["QUANTILE_BOTTOM", "QUANTILE_TOP", "fill_with_torch"]

_BLOCK = 1 << 15  # counters; what is at hand meanwhile stays in the cache

# Fitted on the ranges named below, errors relative to the function.
# ln((1+s)/(1-s)) = 2 s + s^3 P(s^2), |s| < 0.172: 1.5e-8 of P
_LOG = (0.66666666, 0.4000063, 0.28497826, 0.24609293)
# sin(t) = t + t^3 P(t^2), cos(t) = 1 - t^2/2 + t^4 P(t^2), |t| <= pi/4: 3e-11, 2e-12
_SIN = (-1.66666667e-01, 8.33333188e-03, -1.98400872e-04, 2.72499710e-06)
_COS = (4.16666667e-02, -1.38888877e-03, 2.48006007e-05, -2.73009879e-07)
# See [Note: A truncated normal by its inverse]: 8e-6
QUANTILE_TOP = (
    0.7846895447148362,
    -0.060160319113232934,
    -0.3843609909430504,
    0.7340721740361823,
    -0.39379271893392803,
    0.10346203071682425,
)
QUANTILE_BOTTOM = (
    1.0,
    -0.8058224488202204,
    0.637590585011419,
    -0.27965434594054456,
    0.07336065061940784,
)


def fill_with_torch(
    out: Tensor,
    window: Window,
    distribution: Distribution,
    key: Key,
    rounds: int = ROUNDS,
) -> None:
    """Fill a tensor with the values of a window of a larger one.

    Args:
        out: Contiguous; bfloat16, float16 or float32, of as many elements as the
            window.
        window: Which elements of the full tensor these are.
        distribution: What is drawn.
        key: The stream.
        rounds: Of Philox.
    """
    flat = out.view(-1)
    for at, counters, lanes in _blocks(window, out.device):
        values = _values(philox(counters, key, rounds), distribution, out.dtype)
        picked = values.view(-1)[lanes]
        flat[at : at + picked.numel()].copy_(picked)


def _blocks(
    window: Window, device: torch.device
) -> Iterator[tuple[int, Tensor, Tensor | slice]]:
    """Yield places in the output, counters, and which of their values belong there."""
    for at in range(0, window.numel, 4 * _BLOCK):
        end = min(at + 4 * _BLOCK, window.numel)
        if window.rows == 1:
            first, last = window.start + at, window.start + end
            counters = torch.arange(first // 4, (last + 3) // 4, device=device)
            yield at, counters, slice(first % 4, first % 4 + end - at)
            continue
        place = torch.arange(at, end, device=device)
        row = torch.div(place, window.length, rounding_mode="floor")
        index = place + row * (window.stride - window.length) + window.start
        if window.aligned:
            yield at, index[::4] >> 2, slice(None)
        else:
            lanes = torch.arange(end - at, device=device) * 4 + (index & 3)
            yield at, index >> 2, lanes


def _values(
    words: tuple[Tensor, ...], distribution: Distribution, dtype: torch.dtype
) -> Tensor:
    """Turn (n) words of each kind into (n, 4) values, float32.

    Rounding them to `dtype` leaves them in the range of the distribution.
    """
    if isinstance(distribution, Normal):
        columns = [*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])]
        table = torch.stack(columns, -1)
        return table.mul_(distribution.std).add_(distribution.mean)
    if isinstance(distribution, Uniform):
        step = (distribution.high - distribution.low) * 2.0**-32
        table = torch.stack(words, -1).float().mul_(step).add_(distribution.low)
    else:
        table = torch.stack([_quantiles(word, distribution) for word in words], -1)
    return table.clamp_(*distribution.bounds(dtype))


def _box_muller(radial: Tensor, angular: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normals; the radius has 32 bits, the angle 23."""
    uniform = radial.float() * 2.0**-32 + 2.0**-33
    radius = (_log(uniform) * -2.0).clamp_(min=0.0).sqrt_()
    turn = angular >> 9
    shifted = turn + (1 << 20)
    quarter = (shifted >> 21) & 3
    offset = (shifted & ((1 << 21) - 1)) - (1 << 20)
    angle = offset.float() * (2 * math.pi * 2.0**-23)
    square = angle * angle
    sine = angle + angle * square * _polynomial(_SIN, square)
    cosine = (1.0 - square * 0.5) + square * square * _polynomial(_COS, square)
    odd = (quarter & 1) == 1
    # The angle is turned by half a circle, as in the kernel.
    sign = torch.where(quarter >= 2, 1.0, -1.0)
    first, second = torch.where(odd, -sine, cosine), torch.where(odd, cosine, sine)
    return radius * (sign * first), radius * (sign * second)


def _quantiles(word: Tensor, distribution: TruncatedNormal) -> Tensor:
    sides = distribution.sides()
    lower = word < sides.split
    count = torch.where(lower, word, 0xFFFF_FFFF - word).float() + 0.5
    step = torch.where(lower, _f32(sides.below_step), _f32(sides.above_step))
    edge = torch.where(lower, _f32(sides.below), _f32(sides.above))
    tail = (edge + count * step.to(count.device)).clamp_(max=0.5)
    within = 1.0 - tail * 2.0
    root = (1.0 - _log(tail * 4.0 * (1.0 - tail))).sqrt_()
    top, bottom = _polynomial(QUANTILE_TOP, root), _polynomial(QUANTILE_BOTTOM, root)
    signed = torch.where(lower, -within, within) * (top / bottom)
    return signed * sides.spread + distribution.mean


def _f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _log(value: Tensor) -> Tensor:
    """Natural logarithm of positive normal floats."""
    bits = value.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # mantissas from sqrt(1/2) to sqrt(2)
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = ratio * 2.0 + ratio * square * _polynomial(_LOG, square)
    return exponent.float() * math.log(2.0) + series


def _polynomial(coefficients: tuple[float, ...], at: Tensor) -> Tensor:
    value = at * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * at + coefficient
    return value

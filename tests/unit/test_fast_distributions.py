"""The distributions of `rng="fast"`, against scipy's.

A million draws; `DEFERRED_INIT_DRAWS=100000000 python -m pytest
tests/unit/test_fast_distributions.py` takes a hundred million. Streams are fixed, so
that nothing here passes or fails by chance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr, ndtri

from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.fill import fill
from deferred_init.fast.philox import stream_key
from deferred_init.fast.torch_fill import _box_muller, _quantiles

DRAWS = int(os.environ.get("DEFERRED_INIT_DRAWS", "1000000"))
CASES: dict[str, tuple[Distribution, Any]] = {
    "normal": (Normal(), stats.norm()),
    "normal, moved": (Normal(0.5, 0.02), stats.norm(0.5, 0.02)),
    "uniform": (Uniform(-0.25, 0.75), stats.uniform(-0.25, 1.0)),
    "truncated": (TruncatedNormal(), stats.truncnorm(-2, 2)),
    "hardly truncated": (
        TruncatedNormal(0.0, 0.02, -2.0, 2.0),
        stats.norm(0.0, 0.02),
    ),
    "truncated on one side": (
        TruncatedNormal(1.0, 2.0, 2.0, 9.0),
        stats.truncnorm(0.5, 4.0, 1.0, 2.0),
    ),
    "truncated unevenly": (
        TruncatedNormal(0.0, 1.0, -3.0, 0.5),
        stats.truncnorm(-3.0, 0.5),
    ),
    "truncated below": (
        TruncatedNormal(0.0, 1.0, -4.0, -1.5),
        stats.truncnorm(-4.0, -1.5),
    ),
}


@lru_cache(maxsize=2)
def _draws(case: str, name: str = "weight", seed: int = 0) -> torch.Tensor:
    values = torch.empty(DRAWS)
    fill(values, CASES[case][0], stream_key(seed, name, 0))
    return values


def _distance(sorted_values: Any, cdf: Callable[[Any], Any]) -> float:
    """The Kolmogorov-Smirnov distance of sorted values, block by block."""
    count, worst = len(sorted_values), 0.0
    for at in range(0, count, 1 << 20):
        block = sorted_values[at : at + (1 << 20)].astype(np.float64)
        expected = cdf(block)
        rank = np.arange(at, at + len(block))
        above = np.max((rank + 1) / count - expected)
        below = np.max(expected - rank / count)
        worst = max(worst, above, below)
    return worst


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_passes_kolmogorov_and_smirnov(case: str) -> None:
    values = np.sort(_draws(case).numpy())
    distance = _distance(values, CASES[case][1].cdf)
    assert stats.kstwobign.sf(distance * math.sqrt(DRAWS)) > 1e-3


def test_kolmogorov_and_smirnov_find_a_distribution_that_is_slightly_off() -> None:
    values = np.sort(_draws("normal").numpy()) * 1.01
    distance = _distance(values, stats.norm().cdf)
    assert stats.kstwobign.sf(distance * math.sqrt(DRAWS)) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_distribution(case: str) -> None:
    values, exact = _draws(case).double(), CASES[case][1]
    deviation = (values - exact.mean()) / exact.std()
    wanted = [float(part) for part in exact.stats("mvsk")]
    moments = [float((deviation**power).mean()) for power in (1, 2, 3, 4)]
    for power, (found, right) in enumerate(
        zip(moments, (0.0, 1.0, wanted[2], wanted[3] + 3.0), strict=True), start=1
    ):
        spread = float((deviation ** (2 * power)).mean()) - right**2
        assert abs(found - right) < 5 * math.sqrt(spread / DRAWS)


@pytest.mark.parametrize("case", ["normal", "truncated", "uniform"])
def test_bfloat16_values_are_rounded_to_the_nearest(case: str) -> None:
    distribution, exact = CASES[case]
    low = torch.empty(DRAWS, dtype=torch.bfloat16)
    fill(low, distribution, stream_key(1, "bfloat16", 0))
    values, counts = low.float().unique(return_counts=True)
    steps = values.double()
    between = (steps[1:] + steps[:-1]) / 2
    found = counts.cumsum(0)[:-1].double() / DRAWS
    # Only where no representable value is missing between two that were found.
    bits = values.bfloat16().view(torch.int16).int()
    neighbours = (bits[1:] - bits[:-1]).abs() == 1
    distance = (found - torch.from_numpy(exact.cdf(between.numpy())))[neighbours].abs()
    assert float(distance.max()) * math.sqrt(DRAWS) < 2.0


@pytest.mark.parametrize("threshold", [3.5, 4.0, 4.5, 5.0, 5.5])
def test_tails_hold_as_many_values_as_they_should(threshold: float) -> None:
    expected = 2 * ndtr(-threshold) * DRAWS
    for case in ("normal", "hardly truncated"):
        scale = 1.0 if case == "normal" else 0.02
        found = int((_draws(case).abs() > threshold * scale).sum())
        assert stats.poisson.cdf(found, expected) > 1e-4
        assert stats.poisson.sf(found - 1, expected) > 1e-4


def test_the_normal_tail_is_right_word_by_word_beyond_five_and_a_half() -> None:
    # All words whose radius is above 5.5: what 2 * 2**32 draws would find there.
    words = torch.arange(2048)
    radius = torch.hypot(*_box_muller(words, torch.full((2048,), 123 << 20)))
    exact = np.sqrt(-2 * np.log((words.numpy() + 0.5) / 2**32))
    assert np.abs(radius.numpy() / exact - 1).max() < 1e-6
    assert radius.max() > 6.7
    for edge in (5.5, 5.8, 6.1, 6.4, 6.6):
        share = int((radius > edge).sum()) / 2**32
        assert share == pytest.approx(math.exp(-(edge**2) / 2), abs=0.51 / 2**32)


@pytest.mark.parametrize("low_high", [(-2.0, 2.0), (-100.0, 100.0), (1.0, 3.0)])
def test_the_inverse_is_precise_in_both_tails(low_high: tuple[float, float]) -> None:
    edges = torch.tensor([0, 1, 2, 10, 1000, 10**6])
    middle = torch.arange(1, 64) * (2**32 // 64)
    words = torch.cat([edges, middle, 2**32 - 1 - edges])
    made = _quantiles(words, TruncatedNormal(0.0, 1.0, *low_high)).numpy()
    start, end = (ndtr(edge) for edge in low_high)
    below = (words.numpy() + 0.5) / 2**32
    above = (2**32 - 1 - words.numpy() + 0.5) / 2**32
    lower = ndtri(start + below * (end - start))
    upper = -ndtri(ndtr(-low_high[1]) + above * (end - start))
    exact = np.where(below < 0.5, lower, upper)
    assert np.abs(made - exact).max() < 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_keep_to_their_bounds(dtype: torch.dtype) -> None:
    values = torch.empty(200_000, dtype=dtype)
    for low, high in ((0.0, 1.0), (-0.3, 0.3), (1.0, 1.001), (0.1, 0.1), (-3.0, 0.0)):
        fill(values, Uniform(low, high), stream_key(0, "bounds", 0))
        limit = float(torch.tensor(high, dtype=dtype))
        assert low <= float(values.min()) or low == high
        assert float(values.max()) < max(high, limit) or low == high
        fill(values, TruncatedNormal(0.0, 1.0, low, high + 0.5), (1, 2, 3, 4))
        assert low <= float(values.min())
        assert float(values.max()) <= high + 0.5


@pytest.mark.parametrize(("low", "high"), [(-2.0, 1e-11), (-1e-11, 2.0)])
def test_a_side_that_is_narrower_than_a_word_is_no_error(
    low: float, high: float
) -> None:
    distribution = TruncatedNormal(0.0, 1.0, low, high)
    assert distribution.supported
    values = torch.empty(200_000)
    fill(values, distribution, stream_key(0, "narrow", 0))
    assert low <= float(values.min()) < float(values.max()) <= high
    half = math.sqrt(2 / math.pi) * (1 - math.exp(-2)) / math.erf(math.sqrt(2))
    assert abs(float(values.mean())) == pytest.approx(half, abs=5e-3)


def test_bounds_between_which_there_is_no_probability_are_not_supported() -> None:
    assert not TruncatedNormal(0.0, 1.0, 0.0, 1e-17).supported
    assert TruncatedNormal(0.0, 1.0, 4.9, math.nextafter(4.9, 5.0)).supported


def _correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """In units of its standard deviation."""
    a, b = first.double(), second.double()
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    return float((a * b).mean()) * math.sqrt(len(a))


@pytest.mark.parametrize("case", ["normal", "uniform", "truncated"])
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64, 4096])
def test_neighbours_are_not_correlated(case: str, lag: int) -> None:
    values = _draws(case)
    assert abs(_correlation(values[lag:], values[:-lag])) < 4.5
    squares = (values - values.mean()) ** 2
    assert abs(_correlation(squares[lag:], squares[:-lag])) < 4.5


@pytest.mark.parametrize(
    ("name", "seed"),
    [("weight1", 0), ("layers.0.weight", 0), ("layers.1.weight", 0), ("weight", 1)],
)
def test_parameters_and_seeds_are_not_correlated(name: str, seed: int) -> None:
    first, other = _draws("normal"), _draws("normal", name, seed)
    assert abs(_correlation(first, other)) < 4.5
    assert abs(_correlation(first**2, other**2)) < 4.5
    assert abs(_correlation(first[1:], other[:-1])) < 4.5
    assert int((first == other).sum()) < 10 + DRAWS * 1e-5

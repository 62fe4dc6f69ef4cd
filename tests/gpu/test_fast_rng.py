"""`rng="fast"` on a GPU: its integers, its values, its distributions, its layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.fill import fill
from deferred_init.fast.philox import ROUNDS, philox, stream_key
from deferred_init.fast.window import Window

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    from deferred_init.fast.kernels import _philox
pytestmark = pytest.mark.gpu

KEY = stream_key(4, "layers.7.weight", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SMOOTH = [
    Normal(),
    TruncatedNormal(),
    TruncatedNormal(0.0, 0.02, -2.0, 2.0),
    TruncatedNormal(0.0, 1.0, 1.0, 4.0),
    TruncatedNormal(0.0, 1.0, -4.0, -1.5),
]


def _made(
    distribution: Distribution,
    dtype: torch.dtype = torch.float32,
    size: int = 1 << 20,
    device: str = "cuda",
    window: Window | None = None,
) -> Tensor:
    out = torch.full((size,), float("nan"), dtype=dtype, device=device)
    fill(out, distribution, KEY, window)
    return out


@triton.jit(do_not_specialize=["start", "key0", "key1", "word2", "word3"])
def _words(
    out, start, key0, key1, word2, word3, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK)
    w0, w1, w2, w3 = _philox(
        start.to(tl.int64) + lane,
        key0.to(tl.uint32, bitcast=True),
        key1.to(tl.uint32, bitcast=True),
        word2.to(tl.uint32, bitcast=True),
        word3.to(tl.uint32, bitcast=True),
        ROUNDS,
    )
    tl.store(out + lane, w0.to(tl.int64))
    tl.store(out + BLOCK + lane, w1.to(tl.int64))
    tl.store(out + 2 * BLOCK + lane, w2.to(tl.int64))
    tl.store(out + 3 * BLOCK + lane, w3.to(tl.int64))


@pytest.mark.parametrize("rounds", [ROUNDS, 10])
@pytest.mark.parametrize("start", [0, (1 << 32) - 100, 1 << 40])
def test_the_integers_of_the_kernel_are_those_of_torch(start: int, rounds: int) -> None:
    out = torch.empty(4, 256, dtype=torch.int64, device="cuda")
    signed = [word - (1 << 32) if word >> 31 else word for word in KEY]
    _words[(1,)](out, start, *signed, ROUNDS=rounds, BLOCK=256)
    wanted = torch.stack(philox(torch.arange(start, start + 256), KEY, rounds))
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.3, 0.7), (-1e-3, 1e-3)])
def test_uniform_values_are_those_of_the_cpu(dtype: Any, bounds: Any) -> None:
    made = _made(Uniform(*bounds), dtype)
    assert torch.equal(made.cpu(), _made(Uniform(*bounds), dtype, device="cpu"))


@pytest.mark.parametrize("distribution", SMOOTH)
def test_other_values_are_nearly_those_of_the_cpu(distribution: Any) -> None:
    made, wanted = _made(distribution).cpu(), _made(distribution, device="cpu")
    apart = (made - wanted).abs() / distribution.std
    assert float((apart > 1e-5).float().mean()) < 2e-4
    # An error of the logarithm counts most where the radius is next to nothing.
    near_zero = isinstance(distribution, Normal)
    assert float(apart.max()) < (6e-4 if near_zero else 1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        low = _made(distribution, dtype).cpu()
        assert torch.equal(low, made.to(dtype))  # rounded once, to nearest


@pytest.mark.parametrize(
    ("distribution", "dtype"),
    [
        (Normal(), torch.bfloat16),
        (TruncatedNormal(), torch.bfloat16),
        (Uniform(), torch.float32),
    ],
)
def test_windows_have_the_values_of_the_whole(distribution: Any, dtype: Any) -> None:
    whole = _made(distribution, dtype)
    for window in (
        Window(0, 1, 1 << 19, 1 << 19),
        Window(12345, 1, 54321, 54321),
        Window(64, 100, 512, 4096),
        Window(3, 99, 511, 4095),
    ):
        part = _made(distribution, dtype, window.numel, window=window)
        place = torch.arange(window.numel, device="cuda")
        row = torch.div(place, window.length, rounding_mode="floor")
        index = window.start + row * window.stride + place % window.length
        assert torch.equal(part, whole[index])


def test_a_tensor_beyond_four_giga_elements_is_filled_to_its_end() -> None:
    size = (1 << 32) + 4096
    whole = _made(Normal(), torch.bfloat16, size)
    for start in (0, (1 << 31) - 512, (1 << 32) - 512, size - 1024):
        window = Window(start, 1, 1024, 1024)
        part = _made(Normal(), torch.bfloat16, 1024, window=window)
        assert torch.equal(part, whole[start : start + 1024])


def _distance(values: Tensor, cdf: Any) -> float:
    """The Kolmogorov-Smirnov statistic times the root of the number of values."""
    ordered, worst = values.sort().values, 0.0
    for at in range(0, values.numel(), 1 << 24):
        block = ordered[at : at + (1 << 24)].double()
        rank = torch.arange(at, at + block.numel(), device="cuda").double()
        expected = cdf(block)
        above = ((rank + 1) / values.numel() - expected).max()
        below = (expected - rank / values.numel()).max()
        worst = max(worst, float(above), float(below))
    return worst * math.sqrt(values.numel())


def _truncated(value: Tensor) -> Tensor:
    low, high = (0.5 * math.erfc(edge / math.sqrt(2)) for edge in (2.0, -2.0))
    return (torch.special.ndtr(value) - low) / (high - low)


@pytest.mark.parametrize(
    ("distribution", "cdf"),
    [
        (Normal(), torch.special.ndtr),
        (Uniform(), lambda value: value),
        (TruncatedNormal(), _truncated),
    ],
)
def test_a_hundred_million_values_pass_kolmogorov_and_smirnov(
    distribution: Any, cdf: Any
) -> None:
    values = _made(distribution, size=100_000_000)
    assert _distance(values, cdf) < 1.95  # exceeded by chance once in a thousand
    assert _distance(values * 1.002, cdf) > 1.95


def test_tails_of_four_billion_values_are_right_beyond_five_and_a_half() -> None:
    counts = dict.fromkeys((4.5, 5.0, 5.5, 6.0), 0)
    out = torch.empty(1 << 28, device="cuda")
    for repeat in range(16):
        fill(out, Normal(), stream_key(repeat, "tail", 0))
        size = out.abs()
        for edge in counts:
            counts[edge] += int((size > edge).sum())
    for edge, found in counts.items():
        expected = math.erfc(edge / math.sqrt(2)) * 16 * (1 << 28)
        assert abs(found - expected) < 4 * math.sqrt(expected), (edge, found, expected)


def _net() -> nn.Module:
    layers = [nn.Linear(128, 128, device="meta", dtype=torch.bfloat16) for _ in "abc"]
    return nn.Sequential(*layers)


def test_a_model_and_a_part_of_it_agree_and_leave_the_generators() -> None:
    whole, part = _net(), _net()
    del part[0:2]
    part.register_module("2", part._modules.pop("0"))
    state = torch.cuda.get_rng_state()
    di.materialize(whole, "cuda", seed=2, rng="fast")
    di.materialize(part, "cuda", seed=2, rng="fast")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    made = whole.get_submodule("2").weight
    assert torch.equal(part.get_submodule("2").weight, made)
    wanted = torch.empty(128, 128, dtype=torch.bfloat16, device="cuda")
    fill(wanted, Uniform(-(128**-0.5), 128**-0.5), stream_key(2, "2.weight", 0))
    assert torch.equal(made, wanted)


@pytest.mark.te
@pytest.mark.parametrize("preset", ["fp8_delayed", "fp8_current"])
def test_quantized_weights_are_the_quantized_values_of_the_same_fill(
    preset: str,
) -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")

    def model() -> Any:
        options = {"device": "meta", "params_dtype": torch.bfloat16}
        return nn.Sequential(te.Linear(256, 512, **options))

    plain, quantized = model(), model()
    di.materialize(plain, "cuda", seed=3, rng="fast")
    di.materialize(quantized, "cuda", preset, seed=3, rng="fast")
    wanted = torch.empty(512, 256, dtype=torch.bfloat16, device="cuda")
    fill(wanted, Normal(0.0, 0.023), stream_key(3, "0.weight", 0))
    assert torch.equal(plain[0].weight, wanted)
    stored = quantized[0].weight.detach().dequantize().float()
    scale = float(wanted.abs().max())
    error = (stored - wanted.float()).abs() - wanted.float().abs() / 16
    assert type(quantized[0].weight) is not nn.Parameter
    assert float(error.max()) < scale * (2e-3 if preset == "fp8_current" else 2e-2)

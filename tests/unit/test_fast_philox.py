"""The integers of `rng="fast"`, and which of them a window reads."""

from __future__ import annotations

import pytest
import torch

from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.fill import fill, fillable
from deferred_init.fast.philox import philox, stream_key
from deferred_init.fast.window import Window

# Published with Random123 1.14 (`tests/kat_vectors`): rounds, counter, key, result.
KNOWN_ANSWERS = [
    "7 00000000 00000000 00000000 00000000 00000000 00000000 "
    "5f6fb709 0d893f64 4f121f81 4f730a48",
    "7 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff "
    "5207ddc2 45165e59 4d8ee751 8c52f662",
    "7 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 "
    "4dfccaba 190a87f0 c47362ba b6b5242a",
    "10 00000000 00000000 00000000 00000000 00000000 00000000 "
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "10 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff "
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "10 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 "
    "d16cfe09 94fdcceb 5001e420 24126ea1",
]
DISTRIBUTIONS = [Normal(0.5, 2.0), Uniform(-1.0, 3.0), TruncatedNormal(0.1, 1.0, -1, 2)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KEY = stream_key(3, "blocks.0.weight", 0)


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(line: str) -> None:
    rounds, *words = line.split()
    c0, c1, c2, c3, key0, key1, *wanted = (int(word, 16) for word in words)
    # The upper half of a counter of 64 bits is its sign here.
    counter = torch.tensor([c0 | c1 << 32], dtype=torch.uint64).view(torch.int64)
    made = philox(counter, (key0, key1, c2, c3), int(rounds))
    assert [int(word) for word in made] == wanted


def test_streams_differ_in_seed_name_and_ordinal() -> None:
    streams = {
        stream_key(seed, name, ordinal)
        for seed in range(3)
        for name in ("a", "b", "a.b")
        for ordinal in range(3)
    }
    assert len(streams) == 27
    assert all(0 <= word < 2**32 for stream in streams for word in stream)


WINDOWS = [
    Window(0, 1, 999, 999),
    Window(4, 1, 400, 400),
    Window(5, 1, 70, 70),
    Window(8, 6, 16, 64),
    Window(3, 9, 7, 21),
    Window(40, 3, 6, 60),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_window_has_the_values_of_the_whole(
    window: Window, dtype: torch.dtype, distribution: Distribution
) -> None:
    whole = torch.empty(1000, dtype=dtype)
    fill(whole, distribution, KEY)
    part = torch.full((window.numel,), float("nan"), dtype=dtype)
    fill(part, distribution, KEY, window)
    place = torch.arange(window.numel)
    row = place // window.length
    index = window.start + row * window.stride + place % window.length
    assert torch.equal(part, whole[index])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_values_depend_on_no_block_or_thread(distribution: Distribution) -> None:
    large = torch.empty(1 << 18)  # more than one block of the implementation
    fill(large, distribution, KEY)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for start in (0, 1, (1 << 17) - 3, (1 << 17) + 4):
            part = torch.empty((1 << 18) - start)
            fill(part, distribution, KEY, Window(start, 1, part.numel(), part.numel()))
            assert torch.equal(part, large[start:])
    finally:
        torch.set_num_threads(threads)


def test_a_lower_precision_is_the_rounded_single_precision() -> None:
    single = torch.empty(5000)
    fill(single, Normal(), KEY)
    for dtype in (torch.bfloat16, torch.float16):
        low = torch.empty(5000, dtype=dtype)
        fill(low, Normal(), KEY)
        assert torch.equal(low, single.to(dtype))


def test_counters_beyond_32_bits_are_counters_of_their_own() -> None:
    first, later = torch.empty(64), torch.empty(64)
    fill(first, Uniform(), KEY)
    fill(later, Uniform(), KEY, Window(1 << 34, 1, 64, 64))
    assert not torch.equal(first, later)


def test_only_what_a_fill_can_write_counts_as_fillable() -> None:
    whole = torch.empty(4, 6)
    assert fillable(whole, Normal())
    assert fillable(torch.empty(4, 6, device="meta"), Normal())
    assert not fillable(whole[:2], Normal())
    assert not fillable(whole.t(), Normal())
    assert not fillable(torch.empty(4, dtype=torch.float64), Normal())
    assert not fillable(torch.empty(0), Normal())
    assert not fillable(whole, Normal(0.0, -1.0))
    assert not fillable(whole, Normal(float("nan"), 1.0))
    assert not fillable(whole, Uniform(1.0, 0.0))
    assert fillable(whole, Uniform(1.0, 1.0))
    assert not fillable(torch.empty(4, dtype=torch.float16), Uniform(0.0, 1e6))
    assert not fillable(whole, TruncatedNormal(0.0, 1.0, 6.0, 7.0))
    assert not fillable(whole, TruncatedNormal(0.0, 0.0, -1.0, 1.0))

"""The fill as a Triton kernel: each program makes a block of counters.

[Note: At the speed of memory]
What would hold it back, in this order on a Hopper GPU: the 32-bit multiplications of
Philox, then the special functions. So seven rounds; one conversion from integers
per pair of values, as the angle's float is put together from bits; and the hardware's
own approximations (`lg2`, `sqrt`, `sin`, `cos`: absolute errors below 1e-6). The
integers are those of `torch_fill`; normal and truncated values agree with it up to
these errors, before rounding, and uniform values bit for bit.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from deferred_init.fast.philox import KEY_STEPS, MULTIPLIERS
from deferred_init.fast.torch_fill import QUANTILE_BOTTOM, QUANTILE_TOP

__all__ = ["fill_kernel"]

_NORMAL = tl.constexpr(0)
_UNIFORM = tl.constexpr(1)
_M0, _M1 = (tl.constexpr(value) for value in MULTIPLIERS)
_W0, _W1 = (tl.constexpr(value) for value in KEY_STEPS)
_TWO_PI = tl.constexpr(2 * math.pi)
_LN2 = tl.constexpr(math.log(2.0))
_T0, _T1, _T2, _T3, _T4, _T5 = (tl.constexpr(value) for value in QUANTILE_TOP)
_B0, _B1, _B2, _B3, _B4 = (tl.constexpr(value) for value in QUANTILE_BOTTOM)


@triton.jit
def _round(c0, c1, c2, c3, key0, key1):
    first = c0.to(tl.uint64) * _M0
    second = c2.to(tl.uint64) * _M1
    return (
        (second >> 32).to(tl.uint32) ^ c1 ^ key0,
        second.to(tl.uint32),
        (first >> 32).to(tl.uint32) ^ c3 ^ key1,
        first.to(tl.uint32),
    )


@triton.jit
def _philox(counters, key0, key1, word2, word3, ROUNDS: tl.constexpr):
    c0, c1 = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    c2, c3 = word2, word3
    for _ in tl.static_range(ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, key0, key1)
        key0 = (key0 + _W0).to(tl.uint32)
        key1 = (key1 + _W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _unary(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """One of the functions that the hardware approximates."""
    if EXACT:
        if NAME == "lg2":
            y = tl.log2(x)
        elif NAME == "sqrt":
            y = tl.sqrt(x)
        elif NAME == "sin":
            y = tl.sin(x)
        elif NAME == "cos":
            y = tl.cos(x)
        else:
            y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            NAME + ".approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def _box_muller(radial, angular, mean, std, EXACT: tl.constexpr):
    uniform = tl.fma(radial.to(tl.float32), 2.0**-32, 2.0**-33)
    # Near 0 the approximation of the logarithm may have the wrong sign.
    square = tl.maximum(_unary(uniform, "lg2", EXACT) * (-2.0 * _LN2), 0.0)
    radius = _unary(square, "sqrt", EXACT) * std
    turn = ((angular >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    angle = tl.fma(turn, _TWO_PI, -1.5 * _TWO_PI)
    first = tl.fma(radius, _unary(angle, "cos", EXACT), mean)
    second = tl.fma(radius, _unary(angle, "sin", EXACT), mean)
    return first, second


@triton.jit
def _uniform(word, low, step, least, greatest):
    value = word.to(tl.float32) * step + low
    return tl.minimum(tl.maximum(value, least), greatest)


@triton.jit
def _quantile(word, mean, spread, split, below, below_step, above, above_step,
              least, greatest, EXACT: tl.constexpr):  # fmt: skip
    lower = word < split
    count = tl.where(lower, word, word ^ 0xFFFFFFFF).to(tl.float32) + 0.5
    step = tl.where(lower, below_step, above_step)
    edge = tl.where(lower, below, above)
    tail = tl.minimum(tl.fma(count, step, edge), 0.5)
    within = tl.fma(tail, -2.0, 1.0)
    logarithm = _unary(tail * 4.0 * (1.0 - tail), "lg2", EXACT)
    root = _unary(tl.fma(logarithm, -_LN2, 1.0), "sqrt", EXACT)
    top = tl.fma(root, _T5, _T4)
    top = tl.fma(
        tl.fma(tl.fma(tl.fma(top, root, _T3), root, _T2), root, _T1), root, _T0
    )
    bottom = tl.fma(root, _B4, _B3)
    bottom = tl.fma(tl.fma(tl.fma(bottom, root, _B2), root, _B1), root, _B0)
    size = tl.where(lower, -within, within) * top * _unary(bottom, "rcp", EXACT)
    value = tl.fma(size, spread, mean)
    return tl.minimum(tl.maximum(value, least), greatest)


@triton.jit(do_not_specialize=["start", "key0", "key1", "word2", "word3", "split"])
def fill_kernel(
    out, numel, start, length, stride,
    key0, key1, word2, word3,
    mean, spread, split, below, below_step, above, above_step, least, greatest,
    KIND: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write one block; see `fill_with_triton`.

    If the window is not aligned to counters, each element makes its own, and `BLOCK`
    counts elements.
    """
    PER: tl.constexpr = 4 if ALIGNED else 1
    block = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    if ROWS:
        place = block + lane
        row = place // (length // PER)
        index = place + row * ((stride - length) // PER) + start // PER
    else:
        index = (block + start // PER) + lane
    key0, key1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    word2, word3 = word2.to(tl.uint32, bitcast=True), word3.to(tl.uint32, bitcast=True)
    if not ALIGNED:
        which = (index & 3).to(tl.int32)
        index = index >> 2
    w0, w1, w2, w3 = _philox(index, key0, key1, word2, word3, ROUNDS)
    if KIND == _NORMAL:
        v0, v1 = _box_muller(w0, w1, mean, spread, EXACT)
        v2, v3 = _box_muller(w2, w3, mean, spread, EXACT)
    elif KIND == _UNIFORM:
        v0 = _uniform(w0, mean, spread, least, greatest)
        v1 = _uniform(w1, mean, spread, least, greatest)
        v2 = _uniform(w2, mean, spread, least, greatest)
        v3 = _uniform(w3, mean, spread, least, greatest)
    else:
        words = split.to(tl.uint32, bitcast=True)
        v0 = _quantile(w0, mean, spread, words, below, below_step, above, above_step,
                       least, greatest, EXACT)  # fmt: skip
        v1 = _quantile(w1, mean, spread, words, below, below_step, above, above_step,
                       least, greatest, EXACT)  # fmt: skip
        v2 = _quantile(w2, mean, spread, words, below, below_step, above, above_step,
                       least, greatest, EXACT)  # fmt: skip
        v3 = _quantile(w3, mean, spread, words, below, below_step, above, above_step,
                       least, greatest, EXACT)  # fmt: skip
    dtype = out.dtype.element_ty
    if ALIGNED:
        even = tl.interleave(v0.to(dtype), v2.to(dtype))
        odd = tl.interleave(v1.to(dtype), v3.to(dtype))
        values = tl.interleave(even, odd)
        lanes = tl.arange(0, 4 * BLOCK)
        here = out + 4 * block
        left = tl.minimum(numel - 4 * block, 4 * BLOCK).to(tl.int32)
        tl.store(here + lanes, values, mask=lanes < left)
    else:
        low = tl.where(which == 0, v0, v1)
        high = tl.where(which == 2, v2, v3)
        value = tl.where(which < 2, low, high)
        left = tl.minimum(numel - block, BLOCK).to(tl.int32)
        tl.store(out + block + lane, value.to(dtype), mask=lane < left)

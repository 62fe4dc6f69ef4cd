"""The Triton kernel of `rng="fast"`, interpreted on the CPU.

The interpreter rounds to bfloat16 by cutting off, so that is tested on a GPU
(`tests/gpu/test_fast_rng.py`); and it has no approximate functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from deferred_init.fast.distributions import Normal, TruncatedNormal, Uniform
from deferred_init.fast.philox import stream_key
from deferred_init.fast.torch_fill import fill_with_torch
from deferred_init.fast.triton_fill import Tuning, fill_with_triton
from deferred_init.fast.window import Window

WINDOWS = [Window(0, 1, 3001, 3001), Window(4 << 33, 1, 512, 512), Window(3, 1, 97, 97),
           Window(8, 5, 16, 64), Window(5, 5, 7, 31)]
CASES = [(Uniform(-1.0, 2.5), 0.0), (Normal(0.1, 0.5), 3e-6),
         (TruncatedNormal(0.0, 1.0, -2.0, 2.0), 3e-6),
         (TruncatedNormal(0.0, 1.0, 1.0, 4.0), 3e-6),
         (TruncatedNormal(0.0, 1.0, -4.0, -1.0), 3e-6),
         (TruncatedNormal(0.0, 0.02, -2.0, 2.0), 1e-7)]
key = stream_key(1, "weight", 0)
for distribution, tolerance in CASES:
    for window in WINDOWS:
        for dtype, unit in ((torch.float32, 0.0), (torch.float16, 2e-3)):
            made = torch.full((window.numel,), float("nan"), dtype=dtype)
            wanted = made.clone()
            fill_with_torch(wanted, window, distribution, key)
            fill_with_triton(made, window, distribution, key, Tuning(block=256))
            worst = float((made.double() - wanted.double()).abs().max())
            allowed = tolerance + (unit if tolerance else 0.0)
            assert worst <= allowed, (distribution, window, dtype, worst)
            assert made.std() > 0.0
print("agreed", len(CASES) * len(WINDOWS) * 2)
"""


def test_the_kernel_agrees_with_torch_interpreted(
    run_script: Callable[..., Any],
) -> None:
    printed = run_script("-c", SCRIPT, environment={"TRITON_INTERPRET": "1"})
    assert printed.split() == ["agreed", "60"]


def test_kernels_are_kept_under_all_that_triton_compiles_them_for() -> None:
    """Else one that was compiled for other arguments would be launched."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    from deferred_init.fast.triton_fill import _specialized

    def kind(value: float) -> object:
        return native_specialize_impl(CUDABackend, value, False, True, True)

    # What a distribution is made of does not count, of whatever size.
    assert len({kind(value) for value in (0.0, 1.0, 16.0, -2.5, 1e-40, 3e38)}) == 1
    sizes = (1, 2, 4, 15, 16, 17, 4096, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 1 << 40)
    for one in sizes:
        for other in sizes:
            if kind(one) != kind(other):
                assert _specialized(one) != _specialized(other), (one, other)

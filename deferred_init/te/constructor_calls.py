"""What constructors of Transformer Engine call that cannot run without memory.

[Note: What runs around a constructor's tensors]
With `seq_length` and `micro_batch_size`, `LayerNormMLP`, `TransformerLayer` and
`L2Normalization` warm up their compiled functions on the GPU. That makes the first
step faster and changes no value, so models without memory do without. NVFP4's
quantizers read numbers out of a small tensor, and keep a matrix of 16 by 16, both
from a cache of the whole process, which must never see a tensor without memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["replacements"]

_PACKAGE = "transformer_engine."
_NVFP4 = "transformer_engine.pytorch.tensor.nvfp4_tensor"
_READ = ("get_rht_matrix", "get_random_sign_mask_for_rht")


def replacements(*, has_gpu: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, function to call instead) for loaded modules.

    Args:
        has_gpu: Whether there is a GPU; without one, NVFP4's constants are computed
            on the CPU, and are for plans only.
    """
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(_PACKAGE):
            continue
        for name in _warm_ups(module, len(vars(module))):
            yield module, name, _nothing
    nvfp4 = sys.modules.get(_NVFP4)
    for name in _READ:
        function = getattr(nvfp4, name, None)
        if function is not None:
            yield nvfp4, name, _for_real(function, has_gpu)


@functools.lru_cache(maxsize=1024)
def _warm_ups(module: Any, _num_names: int) -> tuple[str, ...]:
    """Names of functions that warm up; remembered for as long as none comes in."""
    return tuple(name for name in vars(module) if name.startswith("warmup_jit_"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _for_real(function: Any, has_gpu: bool) -> Any:
    @functools.wraps(function)
    def real(flag: bool, *device: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if has_gpu:
                return function(flag, *device)
            plain = getattr(function, "__wrapped__", function)
            if device:
                return plain(flag, "cpu")
        # Releases that pass no device (2.9) send the matrix to the GPU by `cuda`.
        with _StaysOnCpu(), torch.no_grad():
            return plain(flag)

    return real


class _StaysOnCpu(TorchFunctionMode):
    """Computes on the CPU, unseen by other modes, what asks for a GPU by `cuda`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))

"""What the installed Transformer Engine and torch can do, of what tests ask for.

A test that needs what an older release lacks says so, by name:
`@te_needs("ops.GroupedLinear")`, or `marks=te_needs(...)` of one case. It is skipped
with the reason that stands here. Everything is found by looking or trying, nothing by
the number of the release; `test_te_capabilities.py` holds that the release that is
vouched for has it all.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

__all__ = ["CAPABILITIES", "Capability", "CpuForCuda", "has", "te_needs"]


class CpuForCuda(torch.overrides.TorchFunctionMode):
    """Builds on the CPU what takes no `device` and asks for CUDA itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")) or given.get("device") == 0:
            given["device"] = "cpu"
        return func(*args, **given)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Something that a release may lack.

    Attributes:
        probe: Whether it is there, told by looking at Transformer Engine's
            `pytorch` or by trying.
        reason: What is missing, as the reason of a skip.
    """

    probe: Callable[[Any], bool]
    reason: str


def _fills_softmax_offset(te: Any) -> bool:
    """Build one where `torch.empty` fills what it allocates with NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        with CpuForCuda():
            made = te.DotProductAttention(2, 8, softmax_type="learnable")
    finally:
        torch.set_deterministic_debug_mode(before)
    return not bool(made.softmax_offset.isnan().any())


def _keeps_records(te: Any) -> bool:
    layer = te.LayerNormLinear(8, 8, device="meta")
    before = layer.param_init_meta["layer_norm_weight"]
    layer.layer_norm_weight = nn.Parameter(torch.empty(8, device="meta"))
    return layer.param_init_meta["layer_norm_weight"] is before


def _block_scaled_ops(te: Any) -> bool:
    from transformer_engine.common.recipe import Float8BlockScaling

    try:
        with te.quantized_model_init(recipe=Float8BlockScaling()):
            te.ops.BasicLinear(32, 32, device="meta")
    except NotImplementedError:
        return False
    return True


def _fakes_cuda(_te: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            torch.empty(1, device="cuda")
    except RuntimeError:
        return False
    return True


def _scales_without_memory(te: Any) -> bool:
    from transformer_engine_torch import DType

    try:
        te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda"))
    except RuntimeError:
        return False
    return True


def _recipe_fields(name: str) -> set[str]:
    from transformer_engine.common import recipe

    return {field.name for field in dataclasses.fields(getattr(recipe, name))}


def _quantized_tensors_take_a_device(te: Any) -> bool:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    bases = (cls for cls in Float8Tensor.__mro__ if cls.__name__ == "QuantizedTensor")
    return "device" in inspect.signature(next(bases).__new__).parameters


def _names_in_init(cls: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = cls.__init__.__code__.co_names
    return names


CAPABILITIES = {
    "ops.GroupedLinear": Capability(
        probe=lambda te: hasattr(te.ops, "GroupedLinear"),
        reason="the release has no `ops.GroupedLinear`",
    ),
    "ops.FusedOperation": Capability(
        probe=lambda te: hasattr(te.ops, "FusedOperation"),
        reason="the release does not export `ops.FusedOperation`",
    ),
    "joined weights": Capability(
        probe=lambda te: (
            "single_grouped_weight" in inspect.signature(te.GroupedLinear).parameters
        ),
        reason="`te.GroupedLinear` takes no `single_grouped_weight`",
    ),
    "block-scaled ops": Capability(
        probe=_block_scaled_ops,
        reason="the release's ops refuse `Float8BlockScaling`",
    ),
    "inner_tensor_specs": Capability(
        probe=lambda te: hasattr(te.MXFP8Quantizer, "inner_tensor_specs"),
        reason="the release's quantizers tell no layout (`inner_tensor_specs`)",
    ),
    "quantized tensors on a CPU": Capability(
        probe=_quantized_tensors_take_a_device,
        reason="the release's quantized tensors take no `device`: they are on CUDA",
    ),
    "current scaling without memory": Capability(
        probe=_scales_without_memory,
        reason="the release's quantizers of current scaling allocate on the GPU",
    ),
    "fake CUDA tensors": Capability(
        probe=_fakes_cuda,
        reason="torch asks a driver for fake CUDA tensors, and there is none",
    ),
    "initialized softmax_offset": Capability(
        probe=_fills_softmax_offset,
        reason="the release leaves `softmax_offset` uninitialized when it is built",
    ),
    "records of registered parameters": Capability(
        probe=_keeps_records,
        reason="the release forgets the init of a parameter that is registered again",
    ),
    "ops built without recipe state": Capability(
        probe=lambda te: (
            "reset_recipe_state" not in _names_in_init(te.ops.op.BasicOperation)
        ),
        reason="the release's ops build their recipe state in their constructor",
    ),
    "locked channels": Capability(
        probe=lambda te: (
            "_extra_tensor_channels_locked" in _names_in_init(te.ops.op.BasicOperation)
        ),
        reason="the release's ops have no channels that a fuser locks",
    ),
    "workspace of products": Capability(
        probe=lambda te: hasattr(te.Linear, "_prealloc_cublas_workspace"),
        reason="the release has no `_prealloc_cublas_workspace`",
    ),
    "recipes with backward_override": Capability(
        probe=lambda _te: "backward_override" in _recipe_fields("NVFP4BlockScaling"),
        reason="the release's recipes have no `backward_override` and later options",
    ),
}


@functools.cache
def has(name: str) -> bool:
    """Whether the installed releases have a capability; asked once in a process.

    The generators are afterwards as before.
    """
    import transformer_engine.pytorch as te

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        if not torch.cuda.is_available():  # constructors ask
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
        try:
            return CAPABILITIES[name].probe(te)
        except (AttributeError, ImportError, TypeError):
            return False  # not even what the probe asks with is there


def te_needs(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test, or of one of its cases, that needs capabilities."""
    return pytest.mark.te_needs(*names)

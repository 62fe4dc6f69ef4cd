"""Every detector for Transformer Engine fires, on weights put together on a CPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import Tensor, nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta, te_on_meta

pytestmark = pytest.mark.te
SIZE = 32
on_a_cpu = te_needs("quantized tensors on a CPU")


def _bytes(*shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).to(torch.uint8).view(shape)


def _both(columnwise: Tensor | None, scales: tuple[int, int]) -> dict[str, Any]:
    return {
        "shape": (SIZE, SIZE),
        "dtype": torch.float32,
        "rowwise_data": _bytes(SIZE, SIZE),
        "rowwise_scale_inv": torch.ones(scales),
        "columnwise_data": columnwise,
        "columnwise_scale_inv": None if columnwise is None else torch.ones(scales),
    }


def _current(te: Any, columnwise: Tensor | None) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    e4m3 = te.DType.kFloat8E4M3
    return Float8Tensor(
        shape=(SIZE, SIZE),
        dtype=torch.float32,
        data=_bytes(SIZE, SIZE),
        data_transpose=columnwise,
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=e4m3,
        quantizer=te.Float8CurrentScalingQuantizer(e4m3, torch.device("cpu")),
    )


def _block(te: Any, columnwise: Tensor | None) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
        Float8BlockwiseQTensor,
    )

    e4m3 = te.DType.kFloat8E4M3
    return Float8BlockwiseQTensor(
        **_both(columnwise, (1, 1)),
        fp8_dtype=e4m3,
        quantizer=te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True),
        is_2D_scaled=True,
    )


def _mxfp8(te: Any, columnwise: Tensor | None) -> Any:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    e4m3 = te.DType.kFloat8E4M3
    return MXFP8Tensor(
        **_both(columnwise, (SIZE, 1)),
        fp8_dtype=e4m3,
        quantizer=te.MXFP8Quantizer(e4m3),
        with_gemm_swizzled_scales=False,
    )


def _nvfp4(te: Any, columnwise: Tensor | None) -> Any:
    from transformer_engine.pytorch.tensor.nvfp4_tensor import (
        NVFP4Quantizer,
        NVFP4Tensor,
    )

    return NVFP4Tensor(
        **{**_both(columnwise, (SIZE, 2)), "rowwise_data": _bytes(SIZE, SIZE // 2)},
        amax_rowwise=torch.ones(1),
        amax_columnwise=torch.ones(1),
        fp4_dtype=te.DType.kFloat4E2M1,
        quantizer=NVFP4Quantizer(),
        with_gemm_swizzled_scales=False,
    )


KINDS: dict[str, Callable[[Any, Tensor | None], Any]] = {
    "current": _current,
    "block": _block,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _holding(
    te: Any, kind: str, columnwise: Tensor | None, owner: str = "module"
) -> nn.Module:
    cls = te.Linear if owner == "module" else te.ops.BasicLinear
    bias = {"bias": False} if owner == "module" else {}
    model: nn.Module = cls(SIZE, SIZE, device="cpu", **bias)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # An NVFP4 quantizer needs a GPU, unless there is none and nothing is made.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        stack.enter_context(te_on_meta())
        model._parameters["weight"] = nn.Parameter(KINDS[kind](te, columnwise))
    return model


def _codes(model: nn.Module, verify: str = "full") -> set[str]:
    return {finding.code for finding in di.audit(model, verify=verify).findings}


@on_a_cpu
@pytest.mark.parametrize("kind", ["block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("owner", ["module", "op"])
def test_a_weight_without_column_wise_data_is_found(
    te: Any, kind: str, owner: str
) -> None:
    model = _holding(te, kind, None, owner)
    assert _codes(model, "fast") == {"te-columnwise-missing"}
    # Who does not train does not read it.
    assert _codes(model.eval(), "fast") == set()
    model.train()
    model.weight.requires_grad_(False)
    assert _codes(model, "fast") == set()


@on_a_cpu
def test_a_weight_that_can_make_column_wise_data_itself_is_no_finding(te: Any) -> None:
    assert _codes(_holding(te, "current", None)) == set()


@on_a_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_column_wise_data_of_zeros_only_are_found(te: Any, kind: str) -> None:
    width = SIZE // 2 if kind == "nvfp4" else SIZE
    zeros = torch.zeros(SIZE, width, dtype=torch.uint8)
    assert _codes(_holding(te, kind, zeros)) == {"te-columnwise-stale"}


@on_a_cpu
@pytest.mark.parametrize("kind", ["current", "block"])
def test_column_wise_data_of_other_values_are_found(te: Any, kind: str) -> None:
    right = _bytes(SIZE, SIZE).mT.contiguous()
    assert _codes(_holding(te, kind, right)) == set()
    stale = right.clone()
    stale[3, 5] += 1
    assert _codes(_holding(te, kind, stale)) == {"te-columnwise-stale"}


@on_a_cpu
def test_a_transpose_that_is_marked_invalid_is_no_finding(te: Any) -> None:
    model = _holding(te, "current", torch.zeros(SIZE, SIZE, dtype=torch.uint8))
    model.weight._transpose_invalid = True
    assert _codes(model) == set()


@on_a_cpu
@pytest.mark.parametrize("owner", ["Linear", "ops.BasicLinear", "GroupedLinear"])
def test_a_quantizer_of_another_recipe_than_asked_is_found(te: Any, owner: str) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    with on_meta(), te.quantized_model_init(recipe=Float8CurrentScaling()):
        if owner == "ops.BasicLinear":
            model = te.ops.BasicLinear(SIZE, SIZE)
        elif owner == "Linear":
            model = te.Linear(SIZE, SIZE, bias=False)
        else:
            model = te.GroupedLinear(2, SIZE, SIZE, bias=False)
    right = _bytes(SIZE, SIZE).mT.contiguous()
    for name in list(model._parameters):
        model._parameters[name] = nn.Parameter(_current(te, right))
    assert "te-quantizer-mismatch" not in _codes(model)
    last = list(model._parameters)[-1]
    model._parameters[last] = nn.Parameter(_block(te, right))
    found = [(f.code, f.fqn) for f in di.audit(model).findings]
    # Without a bias, an empty tensor on meta stands in its place.
    assert [f for f in found if f[0] != "deferred-tensor"] == [
        ("te-quantizer-mismatch", last)
    ]


@on_a_cpu
@pytest.mark.parametrize("field", ["dtype", "block_scaling_dim"])
def test_a_quantizer_of_the_same_class_in_another_format_is_found(
    te: Any, field: str
) -> None:
    from transformer_engine.common.recipe import Float8BlockScaling

    with on_meta(), te.quantized_model_init(recipe=Float8BlockScaling()):
        model = te.Linear(SIZE, SIZE, bias=False)
    right = _bytes(SIZE, SIZE).mT.contiguous()
    model._parameters["weight"] = nn.Parameter(_block(te, right))
    assert "te-quantizer-mismatch" not in _codes(model)
    other = {"dtype": te.DType.kFloat8E5M2, "block_scaling_dim": 1}
    setattr(model.weight._quantizer, field, other[field])
    [finding] = [f for f in di.audit(model).findings if f.code.startswith("te-")]
    assert finding.code == "te-quantizer-mismatch"
    named = {"dtype": "E4M3.*E5M2", "block_scaling_dim": "blocks of 2D.*blocks of 1D"}
    assert re.search(named[field], finding.message), finding.message


def test_module_groups_built_on_old_parameters_are_found(te: Any) -> None:
    model = nn.Sequential(
        te.ops.Sequential(
            te.ops.Linear(4, 4, device="cpu"), te.ops.RMSNorm(4, device="cpu")
        )
    )
    inner: Any = model[0]
    inner._module_groups = inner._make_module_groups(inner._modules.values())
    assert _codes(model) == set()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")  # replaces objects, and tells no fuser
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert "te-fuser-stale" in _codes(model, "fast")
    inner._module_groups = None
    assert "te-fuser-stale" not in _codes(model, "fast")

"""Bytes of quantized weights as planned, against the layouts of Transformer Engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from te_capabilities import te_needs

import deferred_init as di
from deferred_init.cli import main
from deferred_init.representation import Representation

pytestmark = pytest.mark.te

SHAPES = [(256, 128), (4096, 1024), (384, 1152), (96, 160)]


def _quantizer(kind: str, columnwise: bool) -> Any:
    """Make TE's own quantizer, without what its constructor asks of a GPU."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    e4m3 = tex.DType.kFloat8E4M3
    if kind == "current":
        made: Any = te.Float8CurrentScalingQuantizer(e4m3, torch.device("cpu"))
    elif kind.startswith("block"):
        made = te.Float8BlockQuantizer(
            e4m3, rowwise=True, columnwise=True, block_scaling_dim=int(kind[-1])
        )
    elif kind == "mxfp8":
        made = te.MXFP8Quantizer(e4m3)
    else:
        made = NVFP4Quantizer.__new__(NVFP4Quantizer)
        made.row_scaled_nvfp4 = False
    made.rowwise_usage, made.columnwise_usage = True, columnwise
    return made


@te_needs("inner_tensor_specs")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("kind", ["current", "block1", "block2", "mxfp8", "nvfp4"])
def test_planned_bytes_are_those_of_the_quantizers_layout(
    kind: str,
    columnwise: bool,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformer_engine.pytorch import utils

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    utils.is_non_tn_fp8_gemm_supported.cache_clear()
    quantizer = _quantizer(kind, columnwise)
    how = Representation(
        te_recipe="",
        kind=kind.rstrip("12"),
        columnwise=columnwise,
        block_dim=int(kind[-1]) if kind.startswith("block") else 2,
    )
    for shape in SHAPES:
        specs = quantizer.inner_tensor_specs(shape).values()
        expected = sum(math.prod(size) * dtype.itemsize for size, dtype in specs)
        assert how.num_bytes(shape, capability) == expected, shape
    utils.is_non_tn_fp8_gemm_supported.cache_clear()


def test_a_recipe_of_another_kind_has_no_known_bytes() -> None:
    how = Representation(te_recipe="CustomRecipe", kind="custom", columnwise=True)
    assert how.num_bytes((4, 4)) is None


def _model(te: Any) -> Any:
    return te.Linear(256, 512, bias=False, device="meta", params_dtype=torch.bfloat16)


def test_the_plan_counts_both_copies_on_hopper_and_one_on_blackwell(te: Any) -> None:
    sizes = {
        gpu: di.plan(_model(te), "cuda", "fp8_current", gpu=gpu).final_bytes
        for gpu in ("h200", "b200")
    }
    assert sizes == {"h200": 2 * 256 * 512 + 4, "b200": 256 * 512 + 4}
    tensor = (
        di.plan(_model(te), "cuda", "fp8_current", gpu="h200").forecast().tensors[0]
    )
    assert tensor.stored_as == "Float8CurrentScaling, row- and column-wise"


def test_quantized_weights_are_whole_on_each_rank_before_they_are_sharded(
    te: Any,
) -> None:
    planned = di.plan(_model(te), "cuda", "fp8_current", gpu="h200", world_size=8)
    found = planned.forecast()
    assert found.rank_bytes == 2 * 256 * 512 // 8 + 4
    assert found.peak_bytes == planned.final_bytes + 2 * 256 * 512
    assert found.peak_reason.startswith("all of the model on each device")


def test_a_module_built_for_other_hardware_is_refused(te: Any) -> None:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        model = _model(te)
    with pytest.raises(di.PlanError, match="on the GPU that was planned for: `MXFP8"):
        di.plan(model, "cuda", gpu="h100")


TARGET = """
import torch
import transformer_engine.pytorch as te

def build():
    return torch.nn.Sequential(
        te.TransformerLayer(256, 512, 4, fuse_qkv_params=True),
        te.ops.Sequential(te.ops.Linear(256, 256), te.ops.RMSNorm(256)),
    )
"""


def test_the_command_plans_te_models_on_a_machine_without_a_gpu(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "te_plan_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        main(
            ["plan", "te_plan_target:build", "--gpu", "h200", "--recipe", "fp8_current"]
        )
        == 0
    )
    assert "stored as Float8CurrentScaling" in capsys.readouterr().out
    assert (
        main(["plan", "te_plan_target:build", "--gpu", "h200", "--recipe", "nvfp4"])
        == 1
    )

"""Loading onto a GPU: bit for bit, in bounded memory, quantized as TE does it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.sources import Fuse, Split, Stack, open_source

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def stack(num_layers: int = 4, width: int = 96, dtype: Any = None) -> nn.Sequential:
    layers = (nn.Linear(width, width, dtype=dtype) for _ in range(num_layers))
    return nn.Sequential(*layers)


def on_meta(**kwargs: Any) -> nn.Sequential:
    with torch.device("meta"):
        return stack(**kwargs)


def save(state: dict[str, Tensor], folder: Path) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        folder / "model.safetensors",
    )
    return folder


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    for key, tensor in model.state_dict().items():
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu(), state[key].to(tensor.dtype)), key


@pytest.fixture
def tiny_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers far smaller than the tensors, so that each is read in many parts."""
    small = EngineOptions(num_readers=3, buffer_bytes=4096)
    monkeypatch.setattr(
        "deferred_init.handlers.checkpoint.EngineOptions", lambda: small
    )


@pytest.mark.parametrize("kind", ["safetensors", "torch", "mapping", "on_gpu"])
@pytest.mark.parametrize("dtype", [None, BF16, torch.float64])
def test_values_arrive_bit_by_bit_and_are_cast_on_arrival(
    kind: str, dtype: torch.dtype | None, tmp_path: Path, tiny_buffers: None
) -> None:
    state = dict(stack().state_dict())
    weights: Any = state
    if kind == "safetensors":
        weights = save(state, tmp_path)
    elif kind == "torch":
        torch.save(state, tmp_path / "w.pt")
        weights = tmp_path / "w.pt"
    elif kind == "on_gpu":
        weights = {key: value.cuda() for key, value in state.items()}
    model = on_meta()
    report = di.materialize(model, "cuda", weights=weights, dtype=dtype)
    assert report.ok
    assert_holds(model, state)


def test_joined_cut_and_stacked_tensors_arrive(tiny_buffers: None) -> None:
    a, b = torch.randn(50, 70), torch.randn(30, 70)
    model = nn.Linear(70, 80, bias=False, device="meta")
    di.materialize(
        model, "cuda", weights={"a": a, "b": b}, names=[Fuse("weight", ["a", "b"])]
    )
    assert torch.equal(model.weight.cpu(), torch.cat([a, b]))
    wide = nn.Linear(140, 50, bias=False, device="meta")
    fuse = Fuse("weight", ["a", "c"], dim=1)
    weights = {"a": a, "c": torch.randn(50, 70).to(BF16)}
    di.materialize(wide, "cuda", weights=weights, names=[fuse])
    expected = torch.cat([a, weights["c"].float()], dim=1)
    assert torch.equal(wide.weight.cpu(), expected)
    parts = nn.ParameterDict(
        {n: torch.empty(25, 70, device="meta") for n in ("x", "y")}
    )
    split = Split("a", ["x", "y"], groups=5)
    di.materialize(parts, "cuda", weights={"a": a}, names=[split])
    groups = a.view(5, 2, 5, 70)
    assert torch.equal(parts["y"].cpu(), groups[:, 1].reshape(25, 70))
    experts = nn.ParameterDict({"w": torch.empty(3, 50, 70, device="meta")})
    stored = {f"e{i}": torch.randn(50, 70) for i in range(3)}
    di.materialize(experts, "cuda", weights=stored, names=[Stack("w", "e{index}")])
    assert torch.equal(experts["w"].cpu(), torch.stack([*stored.values()]))


def test_memory_on_the_gpu_is_the_model_and_the_ring(tmp_path: Path) -> None:
    state = dict(stack(8, 2048).state_dict())
    save(state, tmp_path)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    options = EngineOptions()
    for dtype, expected in ((None, size), (BF16, size // 2)):
        model = on_meta(num_layers=8, width=2048)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        di.materialize(model, "cuda", weights=tmp_path, dtype=dtype)
        grown = torch.cuda.max_memory_allocated() - before
        staged = 0 if dtype is None else options.buffer_bytes
        assert expected <= grown <= expected + staged + (1 << 20)
        del model


def test_work_on_the_current_stream_sees_loaded_values(tmp_path: Path) -> None:
    """No synchronization of the host is needed before the first kernel."""
    state = dict(stack(4, 1024).state_dict())
    save(state, tmp_path)
    for _ in range(5):
        model = on_meta(num_layers=4, width=1024)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # Memory that other kernels still write when it is given to the model.
            rubbish = [torch.full((1024, 1024), 7.0, device="cuda") for _ in range(8)]
            del rubbish
            di.materialize(model, "cuda", weights=tmp_path)
            sums = [layer.weight.double().sum() for layer in model]
        stream.synchronize()
        for layer, found in enumerate(sums):
            expected = state[f"{layer}.weight"].double().sum()
            assert torch.allclose(found.cpu(), expected, rtol=1e-9)
        assert_holds(model, state)


def test_a_failed_read_leaves_the_model_and_the_gpu_memory_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(dict(stack(4, 1024).state_dict()), tmp_path)
    source: Any = open_source(tmp_path)
    file = source.tensors["3.weight"].extent.file
    read, target = file.read_into, source.tensors["2.weight"].extent.offset

    def fail(offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > target:
            raise OSError("Input/output error")
        read(offset, buffer)

    monkeypatch.setattr(file, "read_into", fail)
    model = on_meta(num_layers=4, width=1024)
    gc.collect()  # what earlier tests left
    before = torch.cuda.memory_allocated()
    with pytest.raises(di.MaterializeError, match="failed: Input/output error"):
        di.materialize(model, "cuda", weights=source)
    assert all(param.is_meta for param in model.parameters())
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# -- quantized -----------------------------------------------------------------------

PRESETS = ["fp8_delayed", "fp8_current", "fp8_block"]
WIDTH = 128


def te_model(device: str, **shared: Any) -> nn.Module:
    te = pytest.importorskip("transformer_engine.pytorch")
    return nn.Sequential(
        te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device, params_dtype=BF16),
        te.Linear(WIDTH, WIDTH, device=device, params_dtype=BF16),
        te.ops.Sequential(te.ops.Linear(WIDTH, WIDTH, device=device, dtype=BF16)),
    )


def parts_of(tensor: Any) -> dict[str, Tensor]:
    """Everything that a quantized tensor keeps."""
    return {
        name: value
        for name, value in vars(tensor).items()
        if isinstance(value, Tensor) and name != "_high_precision_init_val"
    }


def written(part: Tensor, key: str, param: Tensor) -> Tensor:
    """Bytes of a part; scales of 128 x 128 blocks without their padding to four.

    Nobody writes or reads the padding, so it holds whatever was in the memory.
    """
    if key.endswith("wise_scale_inv"):
        rows, columns = (-(-size // 128) for size in param.shape)
        if key.startswith("_columnwise"):
            rows, columns = columns, rows
        part = part[:rows, :columns]
    return part.contiguous().view(torch.uint8)


@pytest.mark.te
@pytest.mark.parametrize("preset", PRESETS)
def test_quantized_weights_are_what_te_makes_of_the_same_values(preset: str) -> None:
    """Row-wise and column-wise, scales too."""
    values = te_model("cuda")
    with torch.no_grad():
        for param in values.parameters():
            param.copy_(torch.randn_like(param) * 3)
    weights = {
        key: value.cpu()
        for key, value in values.state_dict().items()
        if isinstance(value, Tensor) and not key.endswith("_extra_state")
    }
    model = te_model("meta")
    report = di.materialize(
        model, "cuda", preset, weights=weights, missing="error", unexpected="error"
    )
    assert report.ok
    quantized = 0
    expected = dict(values.named_parameters())
    for name, param in model.named_parameters():
        found = parts_of(param)
        if not found:
            assert torch.equal(param, expected[name].to(param.dtype)), name
            continue
        quantized += 1
        quantizer = param._quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=True)
        direct = quantizer(expected[name].detach())
        wanted = parts_of(direct)
        shared = [key for key in found if key in wanted]
        assert any("data" in key for key in shared)
        for key in shared:
            ours, theirs = (written(part[key], key, param) for part in (found, wanted))
            assert torch.equal(ours, theirs), (name, key)
    assert quantized >= 3


@pytest.mark.te
def test_master_weights_start_from_what_was_loaded() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    recipe = di.Recipe(
        name="test",
        te_recipe=di.Recipe.load("fp8_current").te_recipe,
        quantize_weights=True,
        keep_high_precision_init=True,
    )
    weights = {
        key: torch.randn_like(value, device="cpu")
        for key, value in te_model("cuda").state_dict().items()
        if isinstance(value, Tensor) and not key.endswith("_extra_state")
    }
    model = te_model("meta")
    di.materialize(model, "cuda", recipe, weights=weights)
    weight = model[1].weight
    assert torch.equal(weight.get_high_precision_init_val(), weights["1.weight"])

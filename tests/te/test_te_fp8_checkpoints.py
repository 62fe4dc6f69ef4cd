"""Checkpoints with FP8 tensors, as far as a CPU can show it: made by hand, not by TE.

What needs a GPU, models that are trained and resumed, is in `tests/gpu`.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from te_capabilities import te_needs
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import deferred_init as di
from deferred_init.loading.as_stored import copy_as_stored, special_tensor
from deferred_init.sources.dcp import DcpFolder
from deferred_init.sources.mapping import MappingSource
from deferred_init.sources.pieces import along, whole

pytestmark = [
    pytest.mark.te,
    te_needs("quantized tensors on a CPU"),
    pytest.mark.filterwarnings("ignore::Warning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
SHAPE = (16, 32)


def _float8(seed: int, scale: float, *, e5m2: bool = False) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine_torch import DType

    generator = torch.Generator().manual_seed(seed)
    return Float8Tensor(
        shape=SHAPE,
        dtype=torch.bfloat16,
        data=torch.randint(0, 100, SHAPE, dtype=torch.uint8, generator=generator),
        fp8_scale_inv=torch.tensor([scale]),
        fp8_dtype=DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3,
        device=torch.device("cpu"),
    )


def _saved(form: str, tensor: Any, folder: Path) -> Any:
    if form == "mapping":
        return {"w": tensor}
    dcp.save({"w": tensor, "b": torch.ones(3)}, checkpoint_id=folder)
    return folder


def _source(form: str, tensor: Any, folder: Path) -> Any:
    given = _saved(form, tensor, folder)
    return MappingSource(given) if form == "mapping" else DcpFolder(given)


def _same_bits(one: Any, other: Any) -> bool:
    return torch.equal(one._data, other._data) and torch.equal(
        one._scale_inv, other._scale_inv
    )


@pytest.mark.parametrize("form", ["mapping", "dcp"])
def test_bits_and_scale_are_copied_where_the_model_keeps_the_same_format(
    bare_te: Any, form: str, tmp_path: Path
) -> None:
    stored, mine = _float8(0, 0.013), _float8(1, 1.0)
    source = _source(form, stored, tmp_path)
    held = mine._data
    found: Any = special_tensor(source, [whole("w", SHAPE)])
    assert _same_bits(found, stored)
    assert copy_as_stored(found, mine)
    assert _same_bits(mine, stored)
    assert mine._data is held


@pytest.mark.parametrize("form", ["mapping", "dcp"])
def test_nothing_is_copied_into_another_format_or_a_part(
    bare_te: Any, form: str, tmp_path: Path
) -> None:
    source = _source(form, _float8(0, 0.013), tmp_path)
    found: Any = special_tensor(source, [whole("w", SHAPE)])
    for mine in (_float8(1, 1.0, e5m2=True), torch.zeros(SHAPE)):
        assert not copy_as_stored(found, mine)
    other = _float8(1, 1.0, e5m2=True)
    with torch.no_grad():
        other.copy_(found)  # which takes the bits for those of its own format
    assert torch.equal(other._data, found._data)
    assert not torch.equal(other.dequantize(), found.dequantize())
    half = along(
        "w",
        0,
        source_view=SHAPE,
        source_at=0,
        target_view=SHAPE,
        target_at=0,
        length=8,
    )
    assert special_tensor(source, [half, half]) is None
    assert special_tensor(source, [half]) is None


def _saved_in_shards(scales: tuple[float, float], folder: Path) -> list[Any]:
    """Save two halves as two ranks do, each a chunk of one tensor."""
    halves = [_float8(seed, scale) for seed, scale in enumerate(scales)]
    dcp.save({f"w{i}": half for i, half in enumerate(halves)}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    about = metadata.state_dict_metadata
    rows, width = SHAPE
    chunks, stored = [], {}
    for index, info in metadata.storage_data.items():
        start = torch.Size((rows * int(index.fqn[1:]), 0))
        chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(SHAPE)))
        stored[MetadataIndex("w", start, len(chunks) - 1)] = info
    about["w"] = replace(about["w0"], size=torch.Size((2 * rows, width)), chunks=chunks)
    del about["w0"], about["w1"]
    metadata.storage_data = stored
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return halves


def test_shards_that_share_a_scale_are_joined(bare_te: Any, tmp_path: Path) -> None:
    one, two = _saved_in_shards((0.013, 0.013), tmp_path)
    found: Any = DcpFolder(tmp_path).as_stored("w")
    assert torch.equal(found._data, torch.cat([one._data, two._data]))
    assert torch.equal(found._scale_inv, one._scale_inv)


def test_shards_with_scales_of_their_own_are_read_by_value(
    bare_te: Any, tmp_path: Path
) -> None:
    one, two = _saved_in_shards((0.013, 0.5), tmp_path)
    source = DcpFolder(tmp_path)
    assert source.as_stored("w") is None
    values = torch.cat([one.dequantize(), two.dequantize()])
    assert torch.equal(source.read("w", 0, 2 * SHAPE[0]), values)


def test_ordinary_tensors_are_left_to_the_readers(bare_te: Any, tmp_path: Path) -> None:
    source = _source("dcp", _float8(0, 0.013), tmp_path)
    assert source.as_stored("b") is None
    assert MappingSource({"b": torch.ones(3)}).as_stored("b") is None


@pytest.mark.parametrize("form", ["mapping", "dcp"])
def test_a_model_in_high_precision_takes_the_values(
    bare_te: Any, form: str, tmp_path: Path
) -> None:
    stored = _float8(0, 0.013)
    model = nn.ParameterDict(
        {"w": torch.empty(SHAPE, device="meta", dtype=torch.bfloat16)}
    )
    di.materialize(model, "cpu", weights=_saved(form, stored, tmp_path))
    assert type(model["w"]) is nn.Parameter
    assert torch.equal(model["w"], stored.dequantize())


def test_a_file_of_torch_save_with_fp8_tensors_is_refused_with_the_way_out(
    bare_te: Any, tmp_path: Path
) -> None:
    stored = _float8(0, 0.013)
    torch.save({"w": stored}, tmp_path / "w.pt")
    model = nn.ParameterDict({"w": torch.empty(SHAPE, device="meta")})
    text = "1 tensors are of special classes.*`w`.*Load the file yourself and pass"
    with pytest.raises(di.PlanError, match=text):
        di.materialize(model, "cpu", weights=tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    di.materialize(model, "cpu", weights=loaded)
    assert torch.equal(model["w"], stored.dequantize(dtype=torch.float32))


def test_where_transformer_engine_is_not_imported_a_dcp_folder_asks_for_it(
    bare_te: Any, tmp_path: Path
) -> None:
    dcp.save({"w": _float8(0, 0.013)}, checkpoint_id=tmp_path)
    code = f"""
import torch, deferred_init as di
model = torch.nn.ParameterDict({{"w": torch.empty({SHAPE}, device="meta")}})
try:
    di.materialize(model, "cpu", weights={str(tmp_path)!r})
except di.MaterializeError as error:
    assert "import transformer_engine.pytorch before" in str(error), error
    assert model["w"].is_meta
    print("refused")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stdout == "refused\n", run.stderr

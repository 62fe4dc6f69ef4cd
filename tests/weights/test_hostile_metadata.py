"""What DCP folders, torch files and stores may claim, and what becomes of it."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import deferred_init as di
from deferred_init.sources import open_source
from deferred_init.sources.byte_files import LocalFile, TensorBytes


def _folder(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3)}, checkpoint_id=path)
    return path


def _change(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _lead_out(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../other/__0_0.distcp"


def _no_tensors(metadata: Any) -> None:
    metadata.state_dict_metadata.clear()
    metadata.storage_data.clear()


def _numbers_for_files(metadata: Any) -> None:
    for key in metadata.storage_data:
        metadata.storage_data[key] = 3


def _a_list_for_keys(metadata: Any) -> None:
    metadata.state_dict_metadata = [1, 2]


def _a_number_for_a_name(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_lead_out, r"1 file names lead out of the folder: `\.\./other/__0_0\.distcp`"),
        (_no_tensors, "holds no tensors"),
        (_numbers_for_files, "is not usable metadata of a DCP folder"),
        (_a_list_for_keys, "is not usable metadata of a DCP folder"),
        (_a_number_for_a_name, "is not usable metadata of a DCP folder"),
    ],
)
def test_metadata_that_claims_what_cannot_be_is_refused_by_name(
    change: Callable[[Any], None], text: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "dcp")
    assert list(open_source(folder).tensors) == ["a"]
    _change(folder, change)
    with pytest.raises(di.PlanError, match=text) as caught:
        open_source(folder)
    assert str(folder) in str(caught.value)


class _Named:
    """Pickles as a name of another module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def written(self) -> bytes:
        module, _, name = self.name.rpartition(".")
        return f"c{module}\n{name}\n.".encode()


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "pathlib.os",
        "collections.abc",
        "torch.distributed.checkpoint.metadata.os",
        "torch.distributed.checkpoint.metadata.dataclass",
        "torch.distributed.checkpoint.filesystem.FileSystemWriter",
    ],
)
def test_a_name_beside_those_of_metadata_is_refused(name: str, tmp_path: Path) -> None:
    """Not even one that a module of the list has imported."""
    folder = _folder(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(_Named(name).written())
    with pytest.raises(di.PlanError, match=f"metadata of a DCP folder: .*{name}"):
        open_source(folder)


def test_metadata_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "dcp")
    (folder / ".metadata").unlink()
    (folder / ".metadata").mkdir()
    with pytest.raises(di.PlanError, match=r"\.metadata: Is a directory"):
        open_source(folder)


class Special(Tensor):
    """A tensor that computes in a way of its own."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs or {})
        return Tensor._make_subclass(cls, made) if isinstance(made, Tensor) else made


def test_tensors_of_special_classes_are_refused_by_name(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Special]):
        plain = torch.ones(2)
        special = Tensor._make_subclass(Special, plain)
        torch.save({"good": plain, "odd": special}, tmp_path / "a.pt")
        with pytest.raises(
            di.PlanError, match=r"1 tensors are of special classes.*: `odd`"
        ):
            open_source(tmp_path / "a.pt")


def test_a_file_of_one_tensor_has_it_under_an_empty_name(tmp_path: Path) -> None:
    torch.save(torch.arange(3.0), tmp_path / "one.pt")
    source = open_source(tmp_path / "one.pt")
    assert list(source.tensors) == [""]
    assert source.read("", 1, 3).tolist() == [1.0, 2.0]


def test_a_compressed_torch_file_is_read_whole(tmp_path: Path) -> None:
    """Its bytes do not lie in the file as they do in memory."""
    state = nn.Linear(3, 2).state_dict()
    torch.save(state, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    source = open_source(tmp_path / "packed.pt")
    model = nn.Linear(3, 2, device="meta")
    di.materialize(model, "cpu", weights=source)
    assert torch.equal(model.weight, state["weight"])


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(di.PlanError, match="nowhere: No such file or directory"):
        LocalFile(tmp_path / "nowhere")
    with pytest.raises(di.PlanError, match="expected a file"):
        LocalFile(tmp_path)


def test_a_tensor_s_memory_ends_where_it_ends() -> None:
    memory = TensorBytes("mine", torch.arange(2, dtype=torch.int8))
    buffer = bytearray(2)
    memory.read_into(0, memoryview(buffer))
    assert bytes(buffer) == b"\x00\x01"
    memory.read_into(2, memoryview(bytearray(0)))
    for offset, size in ((1, 2), (-1, 1), (3, 0)):
        with pytest.raises(OSError, match="mine has 2 bytes, asked beyond them"):
            memory.read_into(offset, memoryview(bytearray(size)))


def _store(content: bytes) -> str:
    import fsspec

    url = "memory://hostile/model.safetensors"
    fsspec.filesystem("memory").pipe_file("/hostile/model.safetensors", content)
    return url


def test_a_store_whose_file_changes_is_named(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="reads from a store")
    from safetensors.torch import save

    content = save({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    source = open_source(_store(content))
    _store(content + b" ")
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(di.MaterializeError, match="changed while it was used"):
        di.materialize(model, "cpu", weights=source)
    assert model.weight.is_meta
    _store(content[: len(content) - 4])
    with pytest.raises(di.DeferredInitError, match=r"model\.safetensors"):
        di.materialize(model, "cpu", weights=source)
    assert model.weight.is_meta

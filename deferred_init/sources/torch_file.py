"""Files of `torch.save`: only described by torch, and read by offset as all others.

`torch.load` with `map_location="meta"` runs no code from the file and reads no values,
but leaves the offset of each storage in the file.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deferred_init.aliases import byte_span, has_own_dispatch
from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import LocalFile, memory_of, open_bytes
from deferred_init.sources.index import read_index
from deferred_init.sources.mapping import MappingSource, flatten
from deferred_init.sources.protocol import Extent, TensorInfo, TensorSource
from deferred_init.sources.safetensors_files import read_rows

__all__ = ["TorchFile", "open_torch_file", "open_torch_index"]


class TorchFile:
    """The tensors of one file of `torch.save` in its zip form.

    Args:
        file: The file.
        described: What `torch.load` made of it on the meta device.

    Raises:
        PlanError: It holds no tensors.
    """

    def __init__(self, file: LocalFile, described: Mapping[str, Tensor]) -> None:
        self.name = file.name
        self._file = file
        self._described = described
        if not described:
            raise PlanError(
                f"{file.name} holds no tensors: save `model.state_dict()` into it"
            )
        self._tensors = {
            key: TensorInfo(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                extent=Extent(file=file, offset=_begin(tensor))
                if tensor.is_contiguous()
                else None,
            )
            for key, tensor in described.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its dotted name."""
        return self._tensors

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read rows; of a tensor with gaps or permuted sizes, what it spans."""
        info, tensor = self._tensors[key], self._described[key]
        if info.extent is not None:
            return read_rows(info, start, stop)
        first, last = byte_span(tensor)
        count = (last - first) // info.dtype.itemsize
        held = torch.empty(count, dtype=info.dtype, device="cpu")
        self._file.read_into(_begin(tensor), memory_of(held))
        return held.as_strided(tensor.size(), tensor.stride())[start:stop]


def open_torch_file(
    path: Path, *, mapped: bool = True, sha256: str | None = None
) -> TensorSource:
    """Open a file of `torch.save`.

    Args:
        path: The file.
        mapped: Whether tensors may be left in the file on a CPU.
        sha256: Its checksum, if known.

    Raises:
        PlanError: It is no such file, is cut off, holds objects other than tensors
            and plain data, or no tensors.
    """
    file = open_bytes(path, mapped=mapped, sha256=sha256)
    assert isinstance(file, LocalFile)
    if not _has_readable_offsets(path):
        return MappingSource(_load(path, None), name=str(path))
    described = _load(path, "meta")
    offsets = all(
        hasattr(tensor.untyped_storage(), "_checkpoint_offset")
        for tensor in described.values()
        if tensor.numel()
    )
    if not offsets:
        return MappingSource(_load(path, None), name=str(path))
    return TorchFile(file, described)


def open_torch_index(
    path: Path, *, mapped: bool = True, sha256: Mapping[str, str] | None = None
) -> TensorSource:
    """Open the `torch.save` files that an index names; see `open_torch_file`.

    Raises:
        PlanError: Also if a file lacks a key that the index says it has.
    """
    where = read_index(path)
    sums = sha256 or {}
    files = {
        place: open_torch_file(place, mapped=mapped, sha256=sums.get(place.name))
        for place in sorted(set(where.values()))
    }
    absent = [key for key, place in where.items() if key not in files[place].tensors]
    if absent:
        raise PlanError(
            f"{path}: {len(absent)} keys are not in the files that the index names: "
            f"{listing(absent)}. Fetch the checkpoint again"
        )
    return _Joined(str(path), {key: files[place] for key, place in where.items()})


class _Joined:
    """Several sources as one."""

    def __init__(self, name: str, origin: Mapping[str, TensorSource]) -> None:
        self.name = name
        self._origin = origin
        self.tensors = {key: source.tensors[key] for key, source in origin.items()}

    def read(self, key: str, start: int, stop: int) -> Tensor:
        return self._origin[key].read(key, start, stop)


def _begin(tensor: Tensor) -> int:
    """Offset of a described tensor's first byte in the file."""
    offset: int = getattr(tensor.untyped_storage(), "_checkpoint_offset", 0)
    return offset + byte_span(tensor)[0]


def _has_readable_offsets(path: Path) -> bool:
    """Whether storages lie in the file as they do in memory: zip, not packed."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            return False
        orders = [r for r in records if r.filename.endswith("/byteorder")]
        return all(archive.read(r).decode() == sys.byteorder for r in orders)


def _load(path: Path, device: str | None) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location=device or "cpu", weights_only=True)
    except Exception as error:  # damaged pickles fail in every way there is
        raise PlanError(_explain(path, error)) from error
    if isinstance(found, Tensor):
        found = {"": found}
    if not isinstance(found, Mapping):
        raise PlanError(
            f"{path} holds a {type(found).__name__}, expected a mapping of names to "
            "tensors: save `model.state_dict()`"
        )
    tensors = flatten(found)
    odd = [key for key, value in tensors.items() if has_own_dispatch(type(value))]
    if odd:
        raise PlanError(
            f"{path}: {len(odd)} tensors are of special classes, expected plain ones: "
            f"{listing(odd)}. Load the file yourself and pass the mapping"
        )
    return tensors


def _explain(path: Path, error: Exception) -> str:
    text = str(error)
    if "Unsupported" in text or "GLOBAL" in text:
        lines: Iterable[str] = (line.strip() for line in text.splitlines())
        culprit = next((line for line in lines if "GLOBAL" in line), "")
        return (
            f"{path} holds objects other than tensors and plain data, which would run "
            f"code when loaded ({culprit[:200]}). If you trust it, load it yourself "
            "and pass the mapping of tensors"
        )
    return (
        f"{path} is not a usable file of `torch.save`: it is cut off, damaged or of "
        f"another format ({text.splitlines()[0][:200] if text else type(error)})"
    )

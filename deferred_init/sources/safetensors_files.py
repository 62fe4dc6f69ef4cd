"""Safetensors: one file, several, or a folder with an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import (
    LocalFile,
    RemoteFile,
    memory_of,
    open_bytes,
)
from deferred_init.sources.index import parse_index, read_index
from deferred_init.sources.protocol import TensorInfo
from deferred_init.sources.safetensors_header import read_header

__all__ = ["SafetensorsFiles", "read_rows"]


class SafetensorsFiles:
    """The tensors of one or several safetensors files, as one source.

    Args:
        name: What reports call it.
        files: The files, opened.
        keys: If given, which file each key is taken from; others are left out.

    Raises:
        PlanError: A file is malformed, two hold the same key, or a file lacks a key
            that the index says it has.
    """

    def __init__(
        self,
        name: str,
        files: Iterable[LocalFile | RemoteFile],
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._tensors: dict[str, TensorInfo] = {}
        origin: dict[str, str] = {}
        twice: list[str] = []
        for file in files:
            for key, info in read_header(file).items():
                if keys is not None and keys.get(key) != file.name:
                    continue
                if key in origin:
                    twice.append(f"{key} ({origin[key]}, {file.name})")
                origin[key] = file.name
                self._tensors[key] = info
        if twice:
            raise PlanError(
                f"{name}: {len(twice)} keys are in two files: {listing(twice)}. Name "
                "the one file to load, or an index"
            )
        absent = [key for key in keys or () if key not in origin]
        if absent:
            raise PlanError(
                f"{name}: {len(absent)} keys are not in the files that the index "
                f"names: {listing(absent)}. Fetch the checkpoint again"
            )

    @classmethod
    def open(
        cls,
        places: Path | str | Iterable[Path | str],
        *,
        mapped: bool = True,
        sha256: Mapping[str, str] | None = None,
    ) -> SafetensorsFiles:
        """Open files by path or address.

        Args:
            places: One or several; `Path` for local ones.
            mapped: Whether tensors may be left in the file on a CPU.
            sha256: Checksums by the last part of the file's name.
        """
        listed = [places] if isinstance(places, (Path, str)) else list(places)
        files = _open_all(listed, mapped, sha256 or {})
        name = files[0].name if len(files) == 1 else f"{len(files)} safetensors files"
        return cls(name, files)

    @classmethod
    def from_index(
        cls,
        place: Path | str,
        *,
        mapped: bool = True,
        sha256: Mapping[str, str] | None = None,
    ) -> SafetensorsFiles:
        """Open the files that an index names; arguments as for `open`."""
        where: Mapping[str, Path | str]
        if isinstance(place, Path):
            where = read_index(place)
        else:
            base = place.rpartition("/")[0]
            names = parse_index(RemoteFile(place))
            where = {key: f"{base}/{name}" for key, name in names.items()}
        places = sorted(set(where.values()), key=str)
        files = _open_all(places, mapped, sha256 or {})
        return cls(str(place), files, {key: str(file) for key, file in where.items()})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its key."""
        return self._tensors

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read rows of a tensor into memory of their own."""
        return read_rows(self._tensors[key], start, stop)


def read_rows(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Read the rows of a tensor that lies in an extent."""
    assert info.extent is not None
    shape = (stop - start, *info.shape[1:]) if info.shape else ()
    found = torch.empty(shape, dtype=info.dtype, device="cpu")
    if found.numel():
        num_bytes = found.numel() * info.dtype.itemsize
        offset = info.extent.offset + (start * num_bytes) // max(1, stop - start)
        info.extent.file.read_into(offset, memory_of(found))
    return found


def _open_all(
    places: Sequence[Path | str], mapped: bool, sha256: Mapping[str, str]
) -> list[LocalFile | RemoteFile]:
    names = [_last(place) for place in places]
    strangers = [name for name in sha256 if name not in names]
    if strangers:
        raise PlanError(
            f"{len(strangers)} checksums are for files that are not loaded: "
            f"{listing(strangers)}; loaded are {listing(names)}"
        )
    return [
        open_bytes(place, mapped=mapped, sha256=sha256.get(name))
        for place, name in zip(places, names, strict=True)
    ]


def _last(place: Path | str) -> str:
    return place.name if isinstance(place, Path) else place.rpartition("/")[2]

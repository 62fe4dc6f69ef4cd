"""Folders of `torch.distributed.checkpoint`, read by one process."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import LocalFile
from deferred_init.sources.index import is_inside
from deferred_init.sources.protocol import TensorInfo
from deferred_init.sources.quantized import readable, stored_quantized

__all__ = ["METADATA_NAME", "DcpFolder"]

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 2_000_000_000
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {
        "Size",
        *(n for n in dir(torch) if isinstance(vars(torch)[n], torch.dtype)),
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict", "defaultdict"},
}
# Python 3.13 alone calls the home of its paths otherwise; files of either are read.
_MOVED = {"pathlib._local": "pathlib"}


class DcpFolder:
    """The tensors of a DCP folder, whole, however they were sharded when saved.

    Args:
        path: The folder.

    Raises:
        PlanError: Its metadata is missing, damaged or names a place outside the
            folder, or files that it names are missing or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._metadata = _read_metadata(path / METADATA_NAME)
        try:
            self._files = _check_files(path, self._metadata)
            self._reader = _reader(path, self._metadata)
            self._tensors = _tensors(path, self._metadata)
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(_unusable(path / METADATA_NAME, error)) from error

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its dotted name."""
        return self._tensors

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read a whole tensor and return rows of it.

        Raises:
            OSError: It cannot be read, or a file was written to meanwhile.
        """
        info = self._tensors[key]
        special = self.as_stored(key)
        if special is not None:
            quantized: Any = readable(special)
            values: Tensor = quantized.dequantize(dtype=info.dtype).cpu()
            return values[start:stop]
        whole = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self._load(key, whole)
        self._check_unchanged()
        return whole[start:stop] if whole.ndim else whole

    def _check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()

    def _load(self, key: str, whole: Tensor) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():
                # That there is one process is what is asked for, not news.
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load({key: whole}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise OSError(f"{self.name}: `{key}`: {_reason(error)}") from error

    def as_stored(self, key: str) -> Tensor | None:
        """Return a tensor of Transformer Engine's classes whole; None for others."""
        found = stored_quantized(Path(self.name), self._metadata, key)
        self._check_unchanged()
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what DCP's metadata is made of, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if module not in _ALLOWED or "." in name:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        names = _ALLOWED[module]
        if names is not None and name not in names:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        found = super().find_class(module, name)
        if names is None and getattr(found, "__module__", None) != module:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def _reason(error: Any) -> str:
    """Say in one line why DCP could not read a tensor."""
    text = " ".join(str(cause) for cause, _ in error.failures.values())
    if "transformer_engine" in text and "transformer_engine" not in sys.modules:
        return (
            "it is stored as a tensor of Transformer Engine, whose classes torch reads "
            "once they are known: import transformer_engine.pytorch before"
        )
    return text.strip().splitlines()[0][:300] if text.strip() else "it cannot be read"


def _read_metadata(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise PlanError(
                f"{path}: more than {_MAX_METADATA_BYTES:,} bytes, which nobody needs"
            )
        with path.open("rb") as file:
            found = _unpickle(file)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # pickles fail in every way there is
        if isinstance(error, PlanError):
            raise
        raise PlanError(_unusable(path, error)) from error
    if not isinstance(found, Metadata):
        raise PlanError(f"{path} holds a {type(found).__name__}, expected DCP metadata")
    return found


def _unusable(path: Path, error: Exception) -> str:
    return f"{path} is not usable metadata of a DCP folder: {str(error)[:300]}"


def _unpickle(file: IO[bytes]) -> Any:
    return _MetadataUnpickler(file).load()


def _check_files(path: Path, metadata: Any) -> list[LocalFile]:
    """See that every chunk lies within a file of the folder."""
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    outside = [name for name in ends if not is_inside(name)]
    if outside:
        raise PlanError(
            f"{path}: {len(outside)} file names lead out of the folder: "
            f"{listing(outside)}"
        )
    absent = [name for name in ends if not (path / name).is_file()]
    if absent:
        raise PlanError(
            f"{path}: {len(absent)} of {len(ends)} files are not there: "
            f"{listing(absent)}. Fetch the checkpoint again"
        )
    files = [LocalFile(path / name) for name in ends]
    for file, end in zip(files, ends.values(), strict=True):
        if file.size < end:
            raise PlanError(
                f"{file.name} is cut off: it has {file.size} bytes, the metadata "
                f"promises {end}. Fetch the checkpoint again"
            )
    return files


def _tensors(path: Path, metadata: Any) -> dict[str, TensorInfo]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = {
        key: TensorInfo(shape=tuple(about.size), dtype=about.properties.dtype)
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    if not found:
        raise PlanError(
            f"{path} holds no tensors: expected a state dict that "
            "`torch.distributed.checkpoint.save` wrote"
        )
    return found


def _reader(path: Path, metadata: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        """Hands out the metadata that was checked, instead of unpickling it again."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    return Reader(path)

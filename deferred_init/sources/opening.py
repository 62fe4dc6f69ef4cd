"""From what a user passes as `weights=` to a source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from deferred_init.errors import PlanError, listing
from deferred_init.sources.dcp import METADATA_NAME, DcpFolder
from deferred_init.sources.mapping import MappingSource
from deferred_init.sources.protocol import TensorSource
from deferred_init.sources.safetensors_files import SafetensorsFiles
from deferred_init.sources.shared import SharedReads
from deferred_init.sources.torch_file import open_torch_file, open_torch_index

__all__ = ["open_source"]

_INDEX = ".index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def open_source(
    weights: object,
    *,
    mmap: bool = True,
    sha256: Mapping[str, str] | None = None,
    shared: bool = False,
) -> TensorSource:
    """Open weights, without reading values.

    Args:
        weights: A safetensors file; an index (`*.index.json`); a folder with either,
            as Hugging Face keeps them; a folder of `torch.distributed.checkpoint`; a
            file of `torch.save`; an address that fsspec knows (`s3://...`) of a
            safetensors file or an index; a mapping of names to tensors; an object
            with the `TensorSource` protocol.
        mmap: On a CPU, leave tensors in the file where dtype and layout allow. They
            are read when first touched; training them never changes the file, but
            truncating the file while the model lives kills the process. False
            copies.
        sha256: Checksums to compare before anything else, by the files' names.
        shared: For sharded models: what several ranks of a node need is read by one
            of them and sent to the others. Worth it where reading is slower than
            sending, as from a store or a file system in the network. All ranks have
            to pass the same.

    Returns:
        The source, to be passed as `weights=`.

    Raises:
        PlanError: The weights are not there, damaged, or not in a known form.
        TypeError: `weights` is of another type.

    Example:
        >>> import torch
        >>> source = open_source({"weight": torch.zeros(2, 3)})
        >>> source.tensors["weight"].shape
        (2, 3)
    """
    source = _open(weights, mmap, sha256)
    return SharedReads(source) if shared else source


def _open(
    weights: object, mmap: bool, sha256: Mapping[str, str] | None
) -> TensorSource:
    if isinstance(weights, Mapping):
        return MappingSource(weights)
    if isinstance(weights, str) and "://" in weights:
        if weights.endswith(_INDEX):
            return SafetensorsFiles.from_index(weights, sha256=sha256)
        return SafetensorsFiles.open(weights, sha256=sha256)
    if isinstance(weights, (str, os.PathLike)):
        return _open_path(Path(weights), mmap, sha256 or {})
    if isinstance(weights, TensorSource):
        return weights
    raise TypeError(
        "expected a path, an address, a mapping of names to tensors or a TensorSource "
        f"as weights, got {type(weights).__name__}"
    )


def _open_path(path: Path, mmap: bool, sha256: Mapping[str, str]) -> TensorSource:
    if path.is_dir():
        return _open_folder(path, mmap, sha256)
    if not path.exists():
        raise PlanError(
            f"{path}: no such file or folder. Nothing is downloaded: fetch it first, "
            "for example with `huggingface_hub.snapshot_download`"
        )
    if path.name.endswith(_INDEX):
        torch_files = path.name.removesuffix(_INDEX).endswith(_TORCH_SUFFIXES)
        opener: Callable[..., TensorSource] = (
            open_torch_index if torch_files else SafetensorsFiles.from_index
        )
        return opener(path, mapped=mmap, sha256=sha256)
    if path.suffix in _TORCH_SUFFIXES:
        return open_torch_file(path, mapped=mmap, sha256=sha256.get(path.name))
    return SafetensorsFiles.open(path, mapped=mmap, sha256=sha256)


def _open_folder(path: Path, mmap: bool, sha256: Mapping[str, str]) -> TensorSource:
    """Open what a folder holds: an index, safetensors, DCP, `torch.save`, in order."""
    names = sorted(entry.name for entry in path.iterdir())
    indexes = [name for name in names if name.endswith(f".safetensors{_INDEX}")]
    whole = [name for name in names if name.endswith(".safetensors")]
    chosen = _preferred(indexes, "model") or _preferred(whole, "model")
    if chosen is None and len(whole) > 1:
        _check_complete(path, whole)
        places = [path / name for name in whole]
        return SafetensorsFiles.open(places, mapped=mmap, sha256=sha256)
    if chosen is not None:
        return _open_path(path / chosen, mmap, sha256)
    if METADATA_NAME in names:
        return DcpFolder(path)
    torch_files = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    torch_indexes = [name for name in names if name.endswith(f".bin{_INDEX}")]
    chosen = _preferred(torch_indexes, "pytorch_model") or _preferred(
        torch_files, "pytorch_model"
    )
    if chosen is not None:
        return _open_path(path / chosen, mmap, sha256)
    several = (
        f" There are several files: {listing(torch_files)}." if torch_files else ""
    )
    raise PlanError(
        f"{path} holds no weights that are known: expected an index, safetensors, a "
        f"DCP folder's {METADATA_NAME}, or one file of `torch.save`.{several} "
        f"Found {listing(names) or 'nothing'}"
    )


def _preferred(names: list[str], stem: str) -> str | None:
    """Choose the only one, or the one with the usual name."""
    if len(names) == 1 and not _SHARD.fullmatch(names[0]):
        return names[0]
    return next((name for name in names if name.split(".")[0] == stem), None)


def _check_complete(path: Path, names: list[str]) -> None:
    """See that files without an index are the numbered parts of one checkpoint."""
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        family = (match[1], int(match[3])) if match else (name, 0)
        found.setdefault(family, set()).add(int(match[2]) if match else 0)
    if len(found) != 1:
        raise PlanError(
            f"{path} holds several safetensors files and no index: {listing(names)}. "
            "Name the file to load"
        )
    ((_, count), numbers) = next(iter(found.items()))
    absent = sorted(set(range(1, count + 1)) - numbers)
    if absent:
        raise PlanError(
            f"{path}: parts {absent[:10]} of {count} are missing. Fetch the "
            "checkpoint again"
        )

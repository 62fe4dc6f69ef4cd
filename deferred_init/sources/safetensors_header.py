"""The header of a safetensors file, parsed as something that a stranger wrote.

Layout: 8 bytes with the header's length (little endian), the header (JSON: key to
`dtype`, `shape`, `data_offsets`), then the data. Nothing is believed: lengths are
compared with the file's, and offsets with each other, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import LocalFile, RemoteFile
from deferred_init.sources.protocol import Extent, TensorInfo
from deferred_init.sources.strict_json import parse_strictly

__all__ = ["DTYPE_TAGS", "read_header"]

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_MAX_DIMS = 64
_MAX_SIZE = 2**63

DTYPE_TAGS: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class _Entry(NamedTuple):
    begin: int
    end: int
    key: str
    info: TensorInfo


class _Malformed(ValueError):
    """What is wrong with a header, without the file's name."""


def read_header(file: LocalFile | RemoteFile) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, in the order of their data.

    Raises:
        PlanError: The file is cut off, contradicts itself or is of another format;
            says where.
    """
    try:
        start, header = _load_json(file)
        return _tensors(file, start, header)
    except (_Malformed, OSError) as error:
        raise PlanError(f"{file.name} is not a usable safetensors file: {error}") from (
            None if isinstance(error, _Malformed) else error
        )


def _load_json(file: LocalFile | RemoteFile) -> tuple[int, dict[str, Any]]:
    """Return where the data starts, and the header."""
    if file.size < 8:
        raise _Malformed(f"it has {file.size} bytes, expected 8 at the least")
    head = bytearray(min(file.size, 64))
    file.read_into(0, memoryview(head))
    length = int.from_bytes(head[:8], "little")
    if length > file.size - 8:
        raise _Malformed(_too_long(bytes(head), length, file.size))
    if length > _MAX_HEADER_BYTES:
        raise _Malformed(
            f"its header has {length} bytes, expected {_MAX_HEADER_BYTES} at most"
        )
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    try:
        return 8 + length, parse_strictly(text)
    except ValueError as error:
        raise _Malformed(f"in its header: {str(error)[:300]}") from None


def _tensors(
    file: LocalFile | RemoteFile, start: int, header: dict[str, Any]
) -> dict[str, TensorInfo]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _Malformed("its `__metadata__` does not map text to text")
    entries = sorted(
        (_entry(file, start, key, value) for key, value in header.items()),
        key=lambda entry: entry[:2],
    )
    place = 0
    for begin, end, key, _ in entries:
        if begin != place:
            fault = "overlaps the tensor before it" if begin < place else "leaves a gap"
            raise _Malformed(f"`{key}` {fault}: it begins at {begin}, expected {place}")
        place = end
    if start + place != file.size:
        fault = "is cut off" if start + place > file.size else "has bytes left over"
        raise _Malformed(
            f"its data {fault}: the header promises {place} bytes, the file has "
            f"{file.size - start}"
        )
    return {entry.key: entry.info for entry in entries}


def _entry(file: LocalFile | RemoteFile, start: int, key: str, value: Any) -> _Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(
            f"`{key[:200]}` does not consist of dtype, shape and data_offsets"
        )
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPE_TAGS.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        raise _Malformed(
            f"`{key[:200]}` has the dtype {str(tag)[:50]!r}, expected one of "
            f"{listing(list(DTYPE_TAGS), limit=len(DTYPE_TAGS))}"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise _Malformed(f"`{key[:200]}` has the shape {str(shape)[:100]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Malformed(f"`{key[:200]}` has the data_offsets {str(offsets)[:100]}")
    begin, end = offsets
    extent = Extent(file=file, offset=start + begin)
    info = TensorInfo(shape=tuple(shape), dtype=dtype, extent=extent)
    if info.num_bytes != end - begin:
        raise _Malformed(
            f"`{key[:200]}` is {tag} of shape {tuple(shape)}, which is "
            f"{info.num_bytes} bytes, but its data_offsets hold {end - begin}"
        )
    return _Entry(begin, end, key, info)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_SIZE for item in value
    )


def _too_long(head: bytes, length: int, size: int) -> str:
    """Say what the file is if it starts as other known ones do."""
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")):
        return (
            "it starts as a pickle or a `torch.save` file does. If you trust it, "
            "name it `.pt` or `.bin`, and it is read without running any code in it"
        )
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file: fetch it with `git lfs pull`"
    return (
        f"the header should have {length} bytes, more than the whole file ({size}); "
        "it is cut off or of another format"
    )

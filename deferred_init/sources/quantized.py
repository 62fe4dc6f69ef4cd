"""Tensors of Transformer Engine's classes in checkpoints, with bits and scales.

The metadata of a DCP folder has only the dtype that such a tensor pretends to have.
Each chunk is a file of `torch.save`, which begins with what describes the tensor; that
is looked at.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["readable", "stored_quantized"]

_SPECIAL = b"transformer_engine"
_DESCRIPTION_BYTES = 4096


def stored_quantized(folder: Path, metadata: Any, key: str) -> Tensor | None:
    """Read a quantized tensor whole, on the host.

    Args:
        folder: Where the files are.
        metadata: The folder's metadata, checked.
        key: The tensor.

    Returns:
        The tensor; None if it is an ordinary one, or if its parts cannot be joined:
        they are not ranges of rows, or have scales of their own.
    """
    places = {
        tuple(index.offset or ()): info
        for index, info in metadata.storage_data.items()
        if index.fqn == key
    }
    parts = []
    for start, info in sorted(places.items()):
        found = _read(folder / info.relative_path, info)
        if found is None or any(start[1:]):
            return None
        parts.append(found)
    size = tuple(metadata.state_dict_metadata[key].size)
    joined = parts[0] if len(parts) == 1 else _joined(parts)
    return None if joined is None or tuple(joined.shape) != size else joined


def readable(tensor: Tensor) -> Tensor:
    """Return a quantized tensor where Transformer Engine can take it apart.

    On the host it does that with one scale for all elements; what has a scale for each
    block is given to its kernels, which would read host memory.
    """
    kind = type(tensor)
    on_host = tensor.device.type == "cpu" and torch.cuda.is_available()
    is_quantized = kind.__module__.startswith("transformer_engine")
    if on_host and is_quantized and not hasattr(tensor, "_scale_inv"):
        return tensor.to("cuda")
    return tensor


def _read(path: Path, info: Any) -> Any:
    """Read a chunk; None if it is an ordinary tensor, or cannot be read so."""
    if getattr(info, "transform_descriptors", None):
        return None
    if "transformer_engine" not in sys.modules:  # nobody knows its classes
        return None
    with path.open("rb") as file:
        file.seek(info.offset)
        if _SPECIAL not in file.read(min(info.length, _DESCRIPTION_BYTES)):
            return None
        file.seek(info.offset)
        content = io.BytesIO(file.read(info.length))
    found = torch.load(content, map_location="cpu", weights_only=True)
    return found if isinstance(found, Tensor) else None


def _joined(parts: list[Any]) -> Tensor | None:
    """Join rows that share a scale: FSDP2 shards a tensor that has one scale so."""
    first = parts[0]
    alike = all(
        type(part) is type(first)
        and hasattr(part, "_scale_inv")
        and part._data is not None
        and part._fp8_dtype == first._fp8_dtype
        and torch.equal(part._scale_inv, first._scale_inv)
        for part in parts
    )
    if not alike:
        return None
    data = torch.cat([part._data for part in parts])
    found: Tensor = type(first).make_like(first, data=data, shape=data.shape)
    return found

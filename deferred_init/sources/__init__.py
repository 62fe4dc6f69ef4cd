"""Sources of weights: what `materialize(..., weights=...)` reads from."""

from __future__ import annotations

from deferred_init.sources.fused import Fuse, Split
from deferred_init.sources.opening import open_source
from deferred_init.sources.protocol import ByteFile, Extent, TensorInfo, TensorSource
from deferred_init.sources.stacked import Stack, Unstack
from deferred_init.sources.transposed import Transpose

__all__ = [
    "ByteFile",
    "Extent",
    "Fuse",
    "Split",
    "Stack",
    "TensorInfo",
    "TensorSource",
    "Transpose",
    "Unstack",
    "open_source",
]

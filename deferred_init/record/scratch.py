"""Memory whose contents do not matter, for numbers that are drawn for nobody."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.nodes import Value

__all__ = ["Scratch"]


class Scratch:
    """One buffer that is kept, since fresh pages cost more than the draws."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def like(self, value: Value, device: torch.device, own: Tensor | None) -> Tensor:
        """Return memory of a value's geometry.

        Args:
            value: Whose geometry.
            device: Stands for the recording's own device.
            own: The value's own memory if it may be used; then that is returned.
        """
        if own is not None:
            return own
        meta = value.meta
        extent = meta.untyped_storage().nbytes() // meta.element_size()
        place = value.device or device
        kept = self._kept
        fits = (
            kept is not None
            and kept.numel() >= extent
            and kept.dtype == meta.dtype
            and kept.device == place
        )
        if kept is None or not fits:
            kept = torch.empty(extent, dtype=meta.dtype, device=place)
            self._kept = kept
        return kept.as_strided(meta.size(), meta.stride())

    def free(self) -> None:
        """Let go of the buffer."""
        self._kept = None

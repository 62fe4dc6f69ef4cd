"""Which elements of a full tensor a contiguous piece of memory holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of equal length at equal distances, by flat index into the full tensor.

    Attributes:
        start: Index of the first element.
        rows: Number of rows.
        length: Elements of a row.
        stride: From the beginning of one row to that of the next.
    """

    start: int
    rows: int
    length: int
    stride: int

    @classmethod
    def of_whole(cls, numel: int) -> Window:
        """The window that is all of a tensor."""
        return cls(0, 1, numel, numel)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.length

    @property
    def aligned(self) -> bool:
        """Whether each row begins and ends with a counter, which makes four values."""
        last = self.rows > 1 and (self.length % 4 or self.stride % 4)
        return self.start % 4 == 0 and not last

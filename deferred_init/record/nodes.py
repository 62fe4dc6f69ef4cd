"""Values, the storages behind them, and the nodes of a recording.

[Note: Values, storages and nodes]
A `Value` is what one deferred tensor refers to: a geometry (its plain meta tensor)
over a `Storage`. Nodes mutate real tensors when they are replayed, so a view or an
in-place operation needs no functionalization: replaying the nodes in order is what
eager did. A node depends on the nodes that made its values and on every earlier
node that wrote to the storages of its values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deferred_init.aliases import dense_bytes

if TYPE_CHECKING:
    from deferred_init.record.graph import Recording
    from deferred_init.record.trackers import Tracked

__all__ = [
    "External",
    "ForeignValue",
    "Mark",
    "Node",
    "Place",
    "Storage",
    "Stream",
    "Value",
    "nothing",
]


class Storage:
    """One block of memory of the recorded program.

    Attributes:
        writers: Indexes of the nodes that created or wrote to it, ascending.
        real: A weak reference to the storage that a replay handed out, per device.
    """

    __slots__ = ("real", "writers")

    def __init__(self) -> None:
        self.writers: list[int] = []
        self.real: Any = None


class Value:
    """What a deferred tensor refers to.

    Attributes:
        recording: The graph that it belongs to.
        storage: The memory that it is a window on.
        node: Index of the node that made it.
        meta: A plain meta tensor with its shape, strides, offset and dtype.
        device: The device it was explicitly put on; `None` for the default one.
    """

    __slots__ = ("device", "meta", "node", "recording", "storage")

    def __init__(
        self,
        recording: Recording,
        storage: Storage,
        node: int,
        meta: Tensor,
        device: torch.device | None,
    ) -> None:
        self.recording = recording
        self.storage = storage
        self.node = node
        self.meta = meta
        self.device = device

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        return self.meta.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides, in elements."""
        return self.meta.stride()

    @property
    def draws(self) -> bool:
        """Whether any node that wrote its storage draws random numbers."""
        nodes = self.recording.nodes
        return any(nodes[index].stream is not None for index in self.storage.writers)

    def covers_storage(self) -> bool:
        """Whether writing all of it leaves nothing of the storage as it was."""
        meta = self.meta
        return meta.untyped_storage().nbytes() == dense_bytes(meta) and (
            meta.is_contiguous() or meta.numel() == _span(meta)
        )

    def __repr__(self) -> str:
        shape = list(self.meta.shape)
        return f"Value({shape}, {self.meta.dtype}, node {self.node})"


def _span(meta: Tensor) -> int:
    """Elements between the first and the last one that a tensor addresses."""
    return 1 + sum(
        (size - 1) * stride
        for size, stride in zip(meta.shape, meta.stride(), strict=True)
    )


class Stream:
    """One sequence of random numbers.

    Attributes:
        device: The device whose default generator it is; `None` for the default
            generator of whatever device the recording is replayed on.
        generator: The caller's own generator, for explicit ones.
        start: The state that generator had when the recording first saw it.
    """

    __slots__ = ("device", "generator", "start")

    def __init__(
        self,
        device: torch.device | None,
        generator: torch.Generator | None = None,
        start: Tensor | None = None,
    ) -> None:
        self.device = device
        self.generator = generator
        self.start = start


class Place:
    """A device argument: resolved when the node is replayed."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device | None) -> None:
        self.device = device


class External:
    """A real tensor that the recorded program reads, guarded against change."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, *, guarded: bool) -> None:
        self.tensor = tensor
        self.version = tensor._version if guarded else None


class ForeignValue:
    """A value of another recording, as it was when this one read it."""

    __slots__ = ("upto", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.upto = len(value.recording.nodes)


class Node:
    """One recorded operation.

    Attributes:
        index: Its place in the recorded order.
        call: What to call with the resolved arguments.
        args: Positional arguments; values stand where deferred tensors stood.
        kwargs: Keyword arguments, likewise.
        outs: The new values, in the order of the flattened result; `None` for a
            result that is an argument or no tensor.
        writes: Storages that it changes (not those that it creates).
        stream: The stream it draws from; `None` if it draws nothing.
        overwrites: The value that it fills completely without reading it.
    """

    __slots__ = (
        "args",
        "call",
        "index",
        "kwargs",
        "outs",
        "overwrites",
        "stream",
        "writes",
    )

    def __init__(
        self,
        index: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        outs: tuple[Value | None, ...] = (),
        writes: tuple[Storage, ...] = (),
        stream: Stream | None = None,
        overwrites: Value | None = None,
    ) -> None:
        self.index = index
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.writes = writes
        self.stream = stream
        self.overwrites = overwrites

    @property
    def reads(self) -> list[Value]:
        """Every value among its arguments."""
        found: list[Value] = []
        _add_values(self.args, found)
        if self.kwargs:
            _add_values(self.kwargs.values(), found)
        return found

    @property
    def name(self) -> str:
        """The operation's name, for messages."""
        return str(getattr(self.call, "__name__", self.call))

    def __repr__(self) -> str:
        return f"Node({self.index}, {self.name})"


class Mark(Node):
    """A place in the order where somebody else initializes something.

    Attributes:
        payload: What is to be initialized there, usually a module; `None` if it is
            gone, since a mark keeps nothing alive.
        tracked: What the tracker of its generators held there, if it holds tokens.
    """

    __slots__ = ("_payload", "tracked")

    def __init__(self, index: int, payload: Any) -> None:
        super().__init__(index, nothing, (), None)
        self._payload = weakref.ref(payload)
        self.tracked: Tracked | None = None

    @property
    def payload(self) -> Any:
        """What is to be initialized there, if it still lives."""
        return self._payload()


def nothing() -> None:
    """Do nothing; marks and generator events are handled by the replay."""


def _add_values(items: Iterable[Any], found: list[Value]) -> None:
    """Add the values in a nest of arguments."""
    for item in items:
        kind = type(item)
        if kind is Value:
            found.append(item)
        elif kind is tuple or kind is list:
            _add_values(item, found)

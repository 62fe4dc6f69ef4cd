"""The recorded graph: values, the storages behind them, and the nodes in order.

[Note: Values, storages and nodes]
A `Value` is what one deferred tensor refers to: a geometry (its plain meta tensor)
over a `Storage`. Nodes mutate real tensors when they are replayed, so a view or an
in-place operation needs no functionalization: replaying the nodes in order is what
eager did. A node depends on the nodes that made its values and on every earlier
node that wrote to the storages of its values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "External",
    "ForeignValue",
    "Mark",
    "Node",
    "Place",
    "Recording",
    "Reseed",
    "Rewind",
    "Storage",
    "Stream",
    "Value",
    "values_in",
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
        have = meta.untyped_storage().nbytes()
        return have == meta.numel() * meta.element_size() and (
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
        if self.kwargs:
            return [*values_in(self.args), *values_in(tuple(self.kwargs.values()))]
        return list(values_in(self.args))

    @property
    def name(self) -> str:
        """The operation's name, for messages."""
        return str(getattr(self.call, "__name__", self.call))

    def __repr__(self) -> str:
        return f"Node({self.index}, {self.name})"


class Mark(Node):
    """A place in the order where somebody else initializes something.

    Attributes:
        payload: What is to be initialized there, usually a module.
    """

    __slots__ = ("payload",)

    def __init__(self, index: int, payload: Any) -> None:
        super().__init__(index, _nothing, (), None)
        self.payload = payload


class Reseed(Node):
    """The default generators were given a new state.

    Attributes:
        state: The state of the CPU's default generator.
        seed: The seed, if `state` is what seeding gives; then other devices were
            seeded with it too.
    """

    __slots__ = ("seed", "state")

    def __init__(self, index: int, state: Tensor, seed: int | None) -> None:
        super().__init__(index, _nothing, (), None)
        self.state = state
        self.seed = seed


class Rewind(Node):
    """The default generators were put back to an earlier place of the recording.

    Attributes:
        position: Index of the first node after that place.
    """

    __slots__ = ("position",)

    def __init__(self, index: int, position: int) -> None:
        super().__init__(index, _nothing, (), None)
        self.position = position


def _nothing() -> None:
    """Do nothing; marks and generator events are handled by the replay."""


def values_in(items: tuple[Any, ...] | list[Any]) -> Iterator[Value]:
    """Yield the values in a nest of arguments."""
    for item in items:
        if type(item) is Value:
            yield item
        elif type(item) is tuple or type(item) is list:
            yield from values_in(item)


class Recording:
    """Everything that one `deferred_init` call recorded, and what followed.

    Attributes:
        device: The device that the constructor believed to be on.
        nodes: All nodes, in the recorded order. It only grows.
        active: Whether the constructor is still running.
        cpu_start: State of the CPU's default generator when recording began.
        cuda_starts: States of CUDA generators then, by index, where CUDA was running.
        cpu_seen: State in which recording left the CPU's default generator.
        result: What the constructor returned.
        timelines: Generator states met by replays, per device.
        watch: Notices reseeding while the constructor runs.
        made: What `materialize_module` made of the result, by qualified name.
        external: Meta parameters of marked modules, by identity.
        borrowed: Storages of real tensors over memory that is not torch's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nodes: list[Node] = []
        self.active = False
        self.lock = threading.RLock()
        self.cpu_start: Tensor = torch.default_generator.get_state()
        self.cuda_starts: dict[int | None, Tensor] = {}
        self.cpu_seen: Tensor = self.cpu_start
        self.result: Any = None
        self.timelines: dict[Any, Any] = {}
        self.streams: dict[Any, Stream] = {}
        self.default_stream = Stream(None)
        self.watch: Any = None
        self.borrowed: dict[int, Any] = {}
        self.made: dict[str, Value] = {}
        self.external: dict[int, Tensor] = {}

    @property
    def marks(self) -> list[Mark]:
        """The places where somebody else initializes something, in order."""
        return [node for node in self.nodes if isinstance(node, Mark)]

    def mark(self, payload: Any) -> Mark:
        """Append a mark: `payload` is initialized by others at this place."""
        with self.lock:
            node = Mark(len(self.nodes), payload)
            self.nodes.append(node)
        return node

    def start_from_here(self, device: torch.device) -> Callable[[], None]:
        """Take the default generators' present states for those of the beginning.

        Args:
            device: The device of the replay; its generator counts beside the CPU's.

        Returns:
            A function that puts the recorded states back.
        """
        saved = (self.cpu_start, dict(self.cuda_starts), dict(self.timelines))
        self.cpu_start = torch.default_generator.get_state()
        self.cuda_starts.clear()
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            self.cuda_starts[device.index] = state
        self.timelines.clear()

        def restore() -> None:
            self.cpu_start, self.cuda_starts, self.timelines = saved

        return restore

    def stream_on(self, device: torch.device | None) -> Stream:
        """Return the default stream of a device (`None`: of the replay's)."""
        if device is None:
            return self.default_stream
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = Stream(device)
        return stream

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        return self

"""The recorded graph: the nodes in order, and what was true when it was recorded."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deferred_init.record.nodes import Mark, Node, Stream, Value

if TYPE_CHECKING:
    from deferred_init.record.kept_states import KeptState
    from deferred_init.record.trackers import Tracked

__all__ = ["Recording"]


_serials = itertools.count()


class Recording:
    """Everything that one `deferred_init` call recorded, and what followed.

    Attributes:
        device: The device that the constructor believed to be on.
        serial: Its place among all recordings, in the order in which they began.
        nodes: All nodes, in the recorded order. It only grows.
        active: Whether the constructor is still running.
        autocast: The types of device for which autocast is on in the call that it
            makes at present. The dispatcher switches that off before an operation is
            recorded.
        cpu_start: State of the CPU's default generator when recording began.
        cuda_starts: States of CUDA generators then, by index, where CUDA was running.
        cpu_seen: State in which recording left the CPU's default generator.
        timelines: Generator states met by replays, per device.
        watch: Notices reseeding while the constructor runs.
        places: The value of each parameter and buffer of the result, by its module
            and its name. Nothing here keeps a module alive.
        attributes: The `__dict__` of each of these tensors, in the same places; lives
            on where a wrapper replaces the tensor.
        held: The `__dict__` of a tensor for each value that was one of the result's,
            or that a Parameter was given later.
        origins: The value of the parameter behind what a wrapper made of it.
        made: What `materialize_module` made of the result, by qualified name.
        external: Meta parameters of marked modules, by identity.
        external_storages: The keys of their storages.
        marks: The places where somebody else initializes something, in order.
        marked_kinds: The classes of their payloads, by index.
        left_out: Operations on their parameters, which no replay repeats, as text.
        borrowed: Storages of real tensors over memory that is not torch's.
        began_as_another: Whether a recording that is not replayed yet began with the
            same state of the CPU's default generator.
        watched: For each index of a CUDA device whose default generator was watched,
            the number of nodes when that began.
        kept: States that the constructor saved and that live on outside.
        trackers: What the trackers of generators held at the end, of those that modules
            draw from which defer themselves.
        looked_at_random: Whether the constructor saw a value that it had drawn, or
            the seed, so that what it did is right for the recorded state alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.serial = next(_serials)
        self.nodes: list[Node] = []
        self.active = False
        self.autocast: tuple[str, ...] = ()
        self.lock = threading.RLock()
        self.cpu_start: Tensor = torch.default_generator.get_state()
        self.cuda_starts: dict[int | None, Tensor] = {}
        self.cpu_seen: Tensor = self.cpu_start
        self.began_as_another = False
        self._result: Any = None
        self.timelines: dict[Any, Any] = {}
        self.streams: dict[Any, Stream] = {}
        self.default_stream = Stream(None)
        self.watch: Any = None
        self.borrowed: dict[int, Any] = {}
        self.looked_at_random = False
        self.watched: dict[int, int] = {}
        self.kept: tuple[KeptState, ...] = ()
        self.trackers: tuple[Tracked, ...] = ()
        self.made: dict[str, Value] = {}
        self.places: WeakKeyDictionary[nn.Module, dict[str, Value]] = (
            WeakKeyDictionary()
        )
        self.attributes: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = (
            WeakKeyDictionary()
        )
        self.held: dict[Value, dict[str, Any]] = {}
        self.origins: dict[Value, Value | None] = {}
        self.external: dict[int, Tensor] = {}
        self.external_storages: set[int | None] = set()
        self.marks: list[Mark] = []
        self.marked_kinds: dict[int, type] = {}
        self.left_out: dict[str, None] = {}

    def set_result(self, result: Any) -> None:
        """Remember what the constructor returned, without keeping it alive."""
        if isinstance(result, Tensor):
            self._result = vars(result).get("_value")
        elif isinstance(result, nn.Module):
            self._result = weakref.ref(result)

    def is_result(self, obj: Tensor | nn.Module) -> bool:
        """Whether an object is what the constructor returned."""
        if isinstance(obj, Tensor):
            value = vars(obj).get("_value")
            return value is not None and value is self._result
        return isinstance(self._result, weakref.ref) and self._result() is obj

    def mark(self, payload: Any) -> Mark:
        """Append a mark: `payload` is initialized by others at this place."""
        with self.lock:
            node = Mark(len(self.nodes), payload)
            self.nodes.append(node)
            self.marks.append(node)
            self.marked_kinds[node.index] = type(payload)
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

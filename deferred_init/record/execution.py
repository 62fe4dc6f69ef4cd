"""Run single nodes on real tensors.

[Note: Memory is taken at the first use]
A constructor takes the memory of a whole model before it fills any of it for good: the
initialization of a Hugging Face model comes last. Replayed as it was recorded, that
would hold everything at once where a caller keeps only a part or a cast of each
tensor. So a node that only makes memory (`torch.empty`, `zeros`, ...) is put off: the
environment holds the node in the place of its tensor until something uses it. The same
goes for a `Filling` of such a tensor, so that a caller who keeps a part may write that
part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.generators import Generators
from deferred_init.record.nodes import (
    External,
    ForeignValue,
    Node,
    Place,
    Stream,
    Value,
)
from deferred_init.record.problems import ReplayError

__all__ = ["Environment", "Executor", "Filling", "Promise"]

Environment = dict[Value, "Tensor | Node | Promise"]
_MAKES_MEMORY = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.empty_strided}
)
# Arguments that are what they were recorded as, and most are.
_REAL = frozenset({int, float, bool, type(None), torch.dtype})


class Filling:
    """Stands in for a node that overwrites a whole tensor without reading it.

    Args:
        write: Called with a tensor and which part of the whole it is, or None.
    """

    __slots__ = ("write",)

    def __init__(self, write: Callable[[Tensor, Any], None]) -> None:
        self.write = write

    def __call__(self, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Write all of a tensor."""
        self.write(tensor, None)
        return tensor


class Promise:
    """A tensor that has no memory yet: the node that makes it, and what fills it."""

    __slots__ = ("filling", "memory")

    def __init__(self, memory: Node, filling: Filling) -> None:
        self.memory = memory
        self.filling = filling


class Executor:
    """Runs nodes on one device.

    Args:
        device: Stands for the recording's own device.
        generators: The generators to draw from.
        foreign: Computes a value of another recording, as it was read.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Generators,
        foreign: Callable[[ForeignValue], Tensor],
    ) -> None:
        self.device = device
        self.generators = generators
        self._foreign = foreign

    def run(
        self,
        node: Node,
        env: Environment,
        last: dict[int, list[Value]] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> None:
        """Run one node in the caller's grad mode and store what it made.

        Args:
            node: The node.
            env: The real tensors at hand; results are added.
            last: For a node, the values to forget after it.
            call: What to call in place of the node's own function.
        """
        outs = node.outs
        if not outs and isinstance(call, Filling) and _wait(node, call, env):
            pass
        elif len(outs) == 1 and outs[0] is not None and _can_wait(node):
            env[outs[0]] = node
        else:
            self._run_now(node, env, call)
        if last and node.index in last:
            for value in last[node.index]:
                env.pop(value, None)

    def fetch(self, value: Value, env: Environment) -> Tensor:
        """Return a tensor at hand, with memory if it had to wait for some.

        Raises:
            KeyError: If the value has not been computed.
        """
        found = env[value]
        if isinstance(found, Promise):
            filling, env[value] = found.filling, found.memory
            filling(self.fetch(value, env))
            return self.fetch(value, env)
        if isinstance(found, Node):
            self._run_now(found, env)
            found = env[value]
            assert isinstance(found, Tensor)
        return found

    def _run_now(
        self, node: Node, env: Environment, call: Callable[..., Any] | None = None
    ) -> None:
        out = self.call(node, env, call)
        outs = node.outs
        if len(outs) == 1:
            if outs[0] is not None:
                env[outs[0]] = out if isinstance(out, Tensor) else out[0]
        elif outs:
            flat = torch.utils._pytree.tree_leaves(out)
            for value, tensor in zip(outs, flat, strict=True):
                if value is not None:
                    env[value] = tensor

    def call(
        self, node: Node, env: Environment, call: Callable[..., Any] | None = None
    ) -> Any:
        """Call a node's operation, or another in its place, on the real tensors."""
        call = call or node.call
        try:
            # Loops, since a comprehension that fails keeps what it closes over, all
            # tensors at hand, for as long as somebody keeps the error.
            args = []
            for arg in node.args:
                args.append(arg if type(arg) in _REAL else self._real(arg, env))
            if not node.kwargs:
                return call(*args)
            kwargs = {}
            for name, arg in node.kwargs.items():
                real = type(arg) in _REAL
                kwargs[name] = arg if real else self._real(arg, env)
            return call(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise ReplayError(
                f"recorded operation {node.index}, `{node.name}`, cannot be replayed "
                f"on {self.device}: {error}"
            ) from error

    def _real(self, arg: Any, env: Environment) -> Any:
        """Put real objects in the place of recorded ones."""
        kind = type(arg)
        if kind is Value:
            found = env[arg]
            return found if isinstance(found, Tensor) else self.fetch(arg, env)
        if kind is tuple or kind is list:
            items = []
            for item in arg:
                items.append(item if type(item) in _REAL else self._real(item, env))
            return kind(items)
        if kind is Place:
            return arg.device or self.device
        if kind is External:
            return _unchanged(arg)
        if kind is Stream:
            return self.generators.of(arg)
        if kind is ForeignValue:
            return self._foreign(arg)
        return arg


def _can_wait(node: Node) -> bool:
    """Whether a node makes memory and does nothing else."""
    try:
        return node.call in _MAKES_MEMORY and not node.writes and not node.reads
    except TypeError:  # what is called cannot be hashed
        return False


def _wait(node: Node, filling: Filling, env: Environment) -> bool:
    """Put off a fill of what has no memory yet; False if it has some."""
    value = node.overwrites
    found = None if value is None else env.get(value)
    if value is None or found is None or isinstance(found, Tensor):
        return False
    memory = found.memory if isinstance(found, Promise) else found
    env[value] = Promise(memory, filling)
    return True


def _unchanged(external: External) -> Tensor:
    """Return a captured tensor, if it still is what was captured."""
    tensor = external.tensor
    if external.version is not None and tensor._version != external.version:
        raise ReplayError(
            f"a real tensor of shape {list(tensor.shape)} and type {tensor.dtype} that "
            "the model reads was changed in place after it was recorded; materialize "
            "before changing it, or pass a copy"
        )
    return tensor

"""The two small contracts that every handler fulfils, and what they exchange.

[Note: How a handler is called]

1. While the plan is made, the planner walks the modules children first (that is
   the order in which constructors finish) and asks the initializers of each
   module's type, most specific first, to *claim* slots. Claiming reads only.
2. While the plan is executed, each claim's `run` is called once, in the planned
   order, with a `Workspace`, through which alone it may change the model:
   `workspace.filling(step)` for code that fills tensors in place,
   `workspace.adopt(slot, tensor)` for code that makes tensors itself.
   Everything done through the workspace is undone if any later step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from deferred_init.fast.window import Window
from deferred_init.handlers.claims import LAST, Claim, Order, Request, Step
from deferred_init.slots import Inventory, ModuleSite, Slot

__all__ = ["Allocator", "Claim", "Initializer", "Refresher", "Request", "Step"]
__all__ += ["LAST", "Order", "Session", "SessionInitializer", "TreeInitializer"]
__all__ += ["StagedAllocator", "Workspace"]
__all__ += ["has_session", "is_staged", "knows_trees"]


class Workspace(Protocol):
    """The only way in which an initializer changes a model."""

    @property
    def request(self) -> Request:
        """What the caller asked for."""
        ...

    def filling(self, step: Step) -> AbstractContextManager[None]:
        """Let the body fill the step's tensors in place.

        On entry the claimed slots get memory (the same Parameter objects, with
        new contents), and every other parameter and buffer of the same module is
        replaced by scratch of the same geometry, so that an init function that
        writes all of them draws the same random numbers as in eager construction
        and yet leaves real and tied tensors alone. On exit the originals are put
        back, and tensors that the body replaced are adopted.
        """
        ...

    def whole(self, step: Step) -> AbstractContextManager[None]:
        """Let the body write the step's tensors, and nothing else, in full size.

        For init code that is careful with other tensors by itself: like `filling`,
        but nothing else is replaced by scratch.
        """
        ...

    def allocate(self, slots: Sequence[Slot]) -> None:
        """Give memory to the tensors of the slots; their contents are undefined."""
        ...

    def shares_memory(self, slot: Slot) -> bool:
        """Whether other tensors of the model lie in the memory of this one.

        Then `allocate` makes memory for all of them, and adopting would part them.
        """
        ...

    def adopt(self, slot: Slot, tensor: Tensor) -> None:
        """Give the tensor object of a slot the contents of a newly made one."""
        ...

    def fulfil(self, slot: Slot, write: Callable[[Tensor, Window], None]) -> bool:
        """Let the part of a tensor that stays in this process be written in place.

        Args:
            slot: Holds the tensor.
            write: Writes contiguous memory with the values of a window.

        Returns:
            False if the whole is needed: then nothing was done.
        """
        ...

    def rebind(self, slots: Sequence[Slot], tensor: Tensor) -> None:
        """Let whoever holds the tensors of the slots hold another one instead.

        For tensors that cannot keep their identity, such as several that become
        one. Optimizers and holders follow; the report names them.
        """
        ...

    def drop(self, fqn: str) -> None:
        """Say that what was cached under a name is gone on purpose."""
        ...

    def watch(self, module: nn.Module) -> None:
        """Remember a module's attributes now, to be put back on failure.

        All modules of the inventory are watched from the start; call this for
        one that the inventory cannot know.
        """
        ...

    def on_undo(self, action: Any) -> None:
        """Register a callable without arguments, run if a later step fails."""
        ...

    def note(self, text: str) -> None:
        """Add a line to the report's notes."""
        ...


@runtime_checkable
class Initializer(Protocol):
    """Knows the values of the tensors of some kinds of module.

    Attributes:
        name: Short name for plans and reports: `torch.nn`, `te.ops`.
        composite: Whether it is also asked about modules that own no deferred
            tensor themselves but have descendants that do.
    """

    @property
    def name(self) -> str:
        """Short name for plans and reports."""
        ...

    @property
    def composite(self) -> bool:
        """Whether it wants to be asked about modules without slots of their own."""
        ...

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Say which of the pending slots it will make; None for "not mine".

        Args:
            site: A module that owns deferred tensors, or, for a composite
                initializer, one with descendants that do.
            pending: The module's own deferred tensors that nobody has claimed,
                one slot per tensor. Empty if another module makes them all, as for
                a tied head: its constructor drew random numbers for a weight that
                the tie then threw away, so to keep the generator in step claim
                with no slots, and `filling` lends scratch for everything.
            request: What the caller asked for.

        Slots of other modules may be claimed too. What somebody claimed before is
        turned into a rewrite.
        """
        ...

    def run(self, step: Step, workspace: Workspace) -> None:
        """Make what was claimed."""
        ...


class Session(Protocol):
    """What an initializer keeps open while a plan is executed."""

    def run(self, step: Step) -> None:
        """Make what was claimed; steps come in the planned order."""
        ...

    def advance(self, order: Order | None) -> None:
        """Draw everything that eager drew before this place in the order.

        Called before a step of another initializer; None stands for the end.
        """
        ...


@runtime_checkable
class SessionInitializer(Initializer, Protocol):
    """An initializer whose steps share state, such as one replay of a recording."""

    def session(self, steps: Sequence[Step], workspace: Workspace) -> Session:
        """Begin to execute; `steps` are all of this initializer's steps."""
        ...


@runtime_checkable
class TreeInitializer(Initializer, Protocol):
    """Knows how a whole subtree was constructed, and so need not guess an order.

    Asked before everybody else, parents first, about modules with deferred tensors
    below them. What it claims, nobody else is asked about, except initializers
    registered to come last. Not asked where the user registered a rule for any
    module of the subtree.
    """

    def claim_tree(self, site: ModuleSite, request: Request) -> Claim | None:
        """Claim deferred tensors of a module and all its descendants, or None."""
        ...


@runtime_checkable
class Allocator(Protocol):
    """Knows the memory layout of one type of tensor."""

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        """Say why a tensor of this type cannot be made, or None."""
        ...

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Bytes on the device for the final tensor."""
        ...

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of the same class and geometry with real memory."""
        ...


@runtime_checkable
class StagedAllocator(Allocator, Protocol):
    """Knows tensors of which this process keeps only a part.

    Init code is lent a tensor of full size instead; see `staging.py`.
    """

    def full_bytes(self, tensor: Tensor) -> int:
        """Bytes of the whole tensor."""
        ...

    def part_of(
        self, tensor: Tensor, full: Tensor, device: torch.device | None = None
    ) -> Tensor | None:
        """Return the part of a full value as a new tensor; None to copy it by `keep`.

        Args:
            tensor: The home.
            full: The value, on any device.
            device: Where the part is to stay; None if the home has memory already,
                which a new tensor replaces only where nothing can be copied into it.
        """
        ...

    def keep(self, tensor: Tensor, full: Tensor) -> None:
        """Copy the part that stays here out of a full value into the tensor."""
        ...

    def fill(
        self,
        tensor: Tensor,
        write: Callable[[Tensor, Window], None],
        *,
        dry_run: bool = False,
    ) -> bool:
        """Let the part be written where it stays.

        Args:
            tensor: The home; need not have memory for a dry run.
            write: Writes contiguous memory with the values of a window.
            dry_run: Only say whether it can be done.

        Returns:
            Whether the part is a window.
        """
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the full value; may need the other processes."""
        ...

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the same part in another dtype."""
        ...


# `isinstance` with a runtime protocol takes 30 microseconds and is asked per tensor;
# one method each tells these apart as well.
def knows_trees(initializer: Initializer) -> TypeGuard[TreeInitializer]:
    """Whether an initializer wants to be asked about whole subtrees."""
    return hasattr(initializer, "claim_tree")


def has_session(initializer: Initializer) -> TypeGuard[SessionInitializer]:
    """Whether the steps of an initializer share state."""
    return hasattr(initializer, "session")


def is_staged(allocator: Allocator | None) -> TypeGuard[StagedAllocator]:
    """Whether values are made in full size and kept in part."""
    return hasattr(allocator, "full_bytes")


class Refresher(Protocol):
    """Brings up to date what caches structure rather than objects."""

    def refresh(
        self, inventory: Inventory, holders: Sequence[Any], workspace: Workspace
    ) -> None:
        """Look for caches and refresh them; called once, after all steps."""
        ...

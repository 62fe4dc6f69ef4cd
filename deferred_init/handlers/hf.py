"""Initializers for Hugging Face models that cannot be constructed a second time.

These are models changed after construction (adapters, resized embeddings). The module
tree is followed instead: each module's own initializer, in construction order, then at
the end of each `PreTrainedModel`'s constructor its `initialize_weights`, which
overwrites what it knows. See `hf_constructor.py` for what this cannot know, and for the
better way, and [Note: Flags of transformers] in `hf_flags.py` for what is flagged when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from deferred_init.aliases import is_deferred, storage_key
from deferred_init.errors import listing
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.hf_flags import flagged_meanwhile, set_flag
from deferred_init.slots import ModuleSite, Slot, SlotKind, set_aside
from deferred_init.twin import tie_again
from deferred_init.write_probe import ProbeError, probe_writes

__all__ = ["HFInitWeights"]

_REGISTERED = (SlotKind.PARAMETER, SlotKind.BUFFER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Intent:
    """What `initialize_weights` of one model would do, and how it is to be run.

    Attributes:
        filled: Deferred slots that it fills completely.
        touched: Deferred slots that it writes to in part.
        endangered: Real slots that it would write to in spite of the flags.
        real: All real slots, to be flagged meanwhile.
        done: Modules to be flagged as initialized before, by `id`.
    """

    filled: tuple[Slot, ...]
    touched: tuple[Slot, ...]
    endangered: tuple[Slot, ...]
    real: tuple[Slot, ...]
    done: frozenset[int]


class HFInitWeights:
    """Runs `initialize_weights` of each `PreTrainedModel`, at its end."""

    name = "transformers"
    only_uses_torch = True
    composite = True

    def __init__(self) -> None:
        self._intents: WeakKeyDictionary[nn.Module, _Intent] = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim what a dry run on meta fills; the planner sorts out rewrites."""
        model_class = type(site.module).__name__
        source = f"{model_class}.initialize_weights"
        try:
            intent = _dry_run(site)
        except ProbeError as error:
            return Claim(
                problems=(
                    f"`{source}` of `{site.fqn or 'the model'}` cannot be tried "
                    f"without memory to see what it fills ({error}): build the model "
                    "inside `deferred_init(...)`",
                )
            )
        if not intent.filled and not intent.touched:
            return None
        if halves := _half_tied(site):
            return Claim(problems=(halves,))
        self._intents[site.module] = intent
        return Claim(
            slots=intent.filled,
            rewrites=intent.touched,
            source=source,
            assumptions=(
                f"the modules of {model_class} were constructed in the order of the "
                "module tree, drew no random numbers but those of their known "
                "initializers, and were all there when it ran `initialize_weights`",
            ),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run it on the model itself, with real tensors out of its reach."""
        site, intent = step.site, self._intents[step.site.module]
        with workspace.whole(step):
            given = [(slot, slot.read()) for slot in step.claim.slots]
            # In eager construction ties are made after initialization.
            apart = [one for one, other in _ties(site) if one.read() is other.read()]
            settled = step.claim.leaves([*intent.filled, *intent.touched])
            aside = set_aside([*intent.endangered, *apart, *settled])
            with (
                aside,
                flagged_meanwhile(slot.tensor for slot in (*intent.real, *settled)),
            ):
                for one in site.post_order():
                    set_flag(one.module, id(one.module) in intent.done)
                _initialize(site.module)
            for slot, tensor in given:
                if (found := slot.read()) is not tensor:
                    workspace.adopt(slot, found)
                    slot.write(tensor)
        for one in site.post_order():
            set_flag(one.module, True)
        _tie_again(site, {slot.tensor_id for slot in intent.real}, workspace)


def _dry_run(site: ModuleSite) -> _Intent:
    """Run `initialize_weights` on a stand-in without memory."""
    slots = [slot for one in site.post_order() for slot in one.slots]
    done = frozenset(id(one.module) for one, inner in _walk(site) if _done(one, inner))

    def initialize(twin: nn.Module) -> None:
        for ours, its in zip(site.module.modules(), twin.modules(), strict=True):
            set_flag(its, id(ours) in done)
            for name, tensor in (*ours._parameters.items(), *ours._buffers.items()):
                if tensor is not None and not is_deferred(tensor):
                    set_flag(getattr(its, name), True)
        with _visible_inits():
            _initialize(twin)

    writes = probe_writes(site, initialize)
    return _Intent(
        filled=writes.filled,
        touched=writes.touched,
        endangered=writes.real,
        real=tuple(s for s in slots if s.kind in _REGISTERED and not s.deferred),
        done=done,
    )


def _initialize(model: Any) -> None:
    model.initialize_weights()


def _walk(site: ModuleSite) -> Iterator[tuple[ModuleSite, bool]]:
    """Yield each site below, and whether an inner model has initialized it."""
    stack = [(site, False)]
    while stack:
        one, inner = stack.pop()
        inner = inner or (one is not site and isinstance(one.module, PreTrainedModel))
        yield one, inner
        stack.extend((child, inner) for child in one.children)


def _done(site: ModuleSite, inner: bool) -> bool:
    """Whether eager construction would find the module initialized already."""
    owned = [slot for slot in site.slots if slot.kind in _REGISTERED]
    return inner or (bool(owned) and not any(slot.deferred for slot in owned))


@contextmanager
def _visible_inits() -> Iterator[None]:
    """Let every init function fill its tensor also on meta.

    Some return at once there (`trunc_normal_` since torch 2.12), and others compute
    what nobody needs. All of them overwrite the whole tensor.
    """
    originals = dict(initialization.TORCH_INIT_FUNCTIONS)

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return tensor.zero_()

    initialization.TORCH_INIT_FUNCTIONS.update(dict.fromkeys(originals, fill))
    try:
        yield
    finally:
        initialization.TORCH_INIT_FUNCTIONS.update(originals)


def _ties(site: ModuleSite) -> list[tuple[Slot, Slot]]:
    """Pairs of slots that the model says are tied, the dependent one first."""
    prefix = f"{site.fqn}." if site.fqn else ""
    slots = {slot.fqn: slot for one in site.post_order() for slot in one.slots}
    names = getattr(site.module, "all_tied_weights_keys", {}).items()
    pairs = [(slots.get(prefix + a), slots.get(prefix + b)) for a, b in names]
    return [(one, other) for one, other in pairs if one and other]


def _half_tied(site: ModuleSite) -> str | None:
    """Say what is tied by memory only, as `init_empty_weights` leaves it.

    Two Parameters over one memory would be filled one after the other.
    """
    names = [
        f"{one.fqn} and {other.fqn}"
        for one, other in _ties(site)
        if one.tensor is not other.tensor
        and one.deferred
        and storage_key(one.tensor) == storage_key(other.tensor)
    ]
    if not names:
        return None
    return (
        f"{len(names)} ties of `{type(site.module).__name__}` are two Parameter "
        f"objects over one memory: {listing(names)}, expected one object, which "
        "`init_empty_weights` takes apart: call `model.tie_weights()` before"
    )


def _tie_again(site: ModuleSite, real: set[int], workspace: Workspace) -> None:
    """Tie what the model says is tied and `.to("meta")` or a loader took apart."""
    for one, other in _ties(site):
        if one.read() is other.read():
            continue
        if one.tensor_id in real:
            one, other = other, one
        if one.tensor_id not in real and one.tensor.shape == other.tensor.shape:
            tie_again(one, other, workspace)


add_initializer(HFInitWeights(), PreTrainedModel)

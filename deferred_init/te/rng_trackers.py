"""Generators that tensor-parallel Transformer Engine models draw weights from.

A module or op may be given a function that returns a tracker with a named generator
for each purpose. It draws its weights from one of them and leaves it where it
stopped; if the materialization fails, it goes back to where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from deferred_init.handlers.protocol import Workspace
from deferred_init.record import place_of
from deferred_init.record.kept_states import settle_undrawn, unsettle
from deferred_init.record.tokens import is_token_state
from deferred_init.record.trackers import copy_of, put_into, tracker_of
from deferred_init.rng import BY_NAME

__all__ = ["parts_drawn_alike", "restore_on_undo", "tracker_digest"]


def restore_on_undo(module: nn.Module, workspace: Workspace) -> None:
    """Have a module's tracker, if it has one, put back to where it is now by an undo.

    The tracker is one of Transformer Engine's or Megatron's, with `get_states` and
    `set_states`.
    """
    tracker = tracker_of(module)
    if tracker is not None:
        saved = {name: copy_of(state) for name, state in tracker.get_states().items()}
        workspace.on_undo(lambda: put_into(tracker, saved))
        place = place_of(module)
        if place and any(is_token_state(state) for state in saved.values()):
            # Nothing of the recording is replayed, so nobody has lent it its states.
            workspace.on_undo(partial(unsettle, place[0]))
            settle_undrawn(place[0])


def tracker_digest(modules: Iterable[nn.Module]) -> str | None:
    """Digest the states of the modules' trackers, or return None without any.

    What ranks that share a model have to agree on, beside the default generators.
    """
    trackers = {id(t): t for each in modules if (t := tracker_of(each)) is not None}
    if not trackers:
        return None
    found = hashlib.sha256()
    for tracker in trackers.values():
        for name, state in sorted(tracker.get_states().items()):
            copied = copy_of(state)
            raw = copied.cpu().numpy().tobytes() if isinstance(copied, Tensor) else b""
            found.update(name.encode() + raw)
    return found.hexdigest()[:12]


def parts_drawn_alike(module: Any, label: str, policy: str) -> tuple[str, ...]:
    """Say what is assumed where a policy by names draws parts of a weight.

    A tensor-parallel module holds a part under the name of the whole, and a seed that
    is made from the name takes the place of the tracker's generator.
    """
    if policy not in BY_NAME:
        return ()
    size = getattr(module, "tp_size", getattr(module, "tensor_parallel_size", 1)) or 1
    modes = ("parallel_mode", "tensor_parallel_mode", "set_parallel_mode")
    if size < 2 or not any(getattr(module, m, 0) for m in modes):
        return ()
    return (
        f'{label} draws its part of {size} under rng="{policy}", which gives '
        "tensor-parallel ranks of one seed the same part: pass each of them a seed of "
        'its own, or rng="eager", which draws from the tracker',
    )

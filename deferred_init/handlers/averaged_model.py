"""Initializer for `torch.optim.swa_utils.AveragedModel`, a deep copy of a model.

Its tensors begin as copies of the source's, with no random numbers drawn. It keeps no
reference to the source, so that has to be among the models of the same call, or
beside it in the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from deferred_init.handlers.protocol import LAST, Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer, construction_order
from deferred_init.inventory import site_of
from deferred_init.slots import ModuleSite, Slot
from deferred_init.twin import difference

__all__ = ["AveragedModelInit"]

_COUNTER = "n_averaged"


class AveragedModelInit:
    """Copies the values of the source model once that is complete."""

    name = "averaged model"
    composite = False

    def __init__(self) -> None:
        self._sources: WeakKeyDictionary[nn.Module, dict[int, Slot]]
        self._sources = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim nothing alone; see `claim_tree`."""
        return None

    def claim_tree(self, site: ModuleSite, request: Request) -> Claim | None:
        """Claim everything deferred below, if the source is found."""
        module = site.module
        assert isinstance(module, AveragedModel)
        made = tuple(s for one in site.post_order() for s in one.slots if s.deferred)
        inner = next((c for c in site.children if c.module is module.module), None)
        if inner is None or construction_order(inner.module) is not None:
            return None
        sources = list(_sources(inner, site, request))
        if len(sources) != 1:
            return Claim(slots=made, problems=(_problem(site, inner, len(sources)),))
        self._sources[module] = dict(_pairs(inner, sources[0]))
        return Claim(
            slots=made,
            source=f"copy of {sources[0].title}",
            assumptions=(
                f"`{site.fqn or 'AveragedModel'}` was copied from "
                f"`{sources[0].title}` and not "
                "updated since",
            ),
            order=LAST,
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Copy, and count from zero."""
        sources = self._sources[step.site.module]
        workspace.allocate(step.claim.slots)
        with torch.no_grad():
            for slot in step.claim.slots:
                source = sources.get(slot.tensor_id)
                if source is not None:
                    slot.read().copy_(source.read())
                elif slot.name == _COUNTER:
                    slot.read().zero_()
                else:
                    raise RuntimeError(f"{slot.describe()} has no source")


def _sources(
    inner: ModuleSite, site: ModuleSite, request: Request
) -> Iterator[ModuleSite]:
    """Find modules outside of the copy that have the same structure."""
    own = {id(one.module) for one in site.post_order()}
    kind = type(inner.module)
    for one in (one for root in request.roots for one in root.post_order()):
        if type(one.module) is not kind or id(one.module) in own:
            continue
        with torch.no_grad():
            alike = difference(inner, site_of(one.module)) is None
        if alike:
            yield one


def _pairs(inner: ModuleSite, source: ModuleSite) -> Iterator[tuple[int, Slot]]:
    """Pair each tensor of the copy with the slot in the same place of the source."""
    theirs = {
        (_below(source, slot), slot.kind): slot
        for one in source.post_order()
        for slot in one.slots
    }
    for one in inner.post_order():
        for slot in one.slots:
            found = theirs.get((_below(inner, slot), slot.kind))
            if found is not None:
                yield slot.tensor_id, found


def _below(site: ModuleSite, slot: Slot) -> str:
    return slot.fqn[len(site.fqn) :].lstrip(".")


def _problem(site: ModuleSite, inner: ModuleSite, count: int) -> str:
    kind = type(inner.module).__name__
    name = site.fqn or "AveragedModel"
    found = f"{count} such models" if count else "none"
    return (
        f"`{name}` (`AveragedModel`) is a copy of a `{kind}`: expected its source, one "
        f"`{kind}` of the same structure, among the models of this call, found "
        f"{found}. Pass both in one list, or build the `AveragedModel` after "
        "`materialize`"
    )


add_initializer(AveragedModelInit(), AveragedModel)

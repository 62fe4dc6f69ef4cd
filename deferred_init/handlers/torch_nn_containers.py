"""Initializers for the `nn.Transformer` family.

[Note: Layers that are copies of one prototype]
Problem: `nn.TransformerEncoder` and `nn.TransformerDecoder` deep-copy one layer, so in
eager construction all layers begin with equal values, drawn once.

Naive attempt: reset each layer in turn; all differ, and the generator moves on too far.
Or make the first and copy it; then a layer of which a part is loaded needs cases.

Design: every layer is made by the same stretch of the random stream. The generators
are put back to where the first layer began before each further layer is made by its
own modules' initializers.

Shortcoming: under `rng="by_name"` each tensor has its own stream, and layers differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn

from deferred_init.handlers.protocol import (
    Claim,
    Initializer,
    Request,
    Step,
    Workspace,
)
from deferred_init.handlers.registry import (
    add_initializer,
    initializers_for,
    last_initializers,
    tree_initializers_for,
)
from deferred_init.record import value_in_place
from deferred_init.rng import GeneratorSnapshot
from deferred_init.slots import ModuleSite, Slot, SlotKind

__all__ = ["TransformerInit", "TransformerStack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One step inside the stack: who makes what, and for which layer.

    Attributes:
        layer: The layer that it belongs to, or None for the final norm.
    """

    site: ModuleSite
    initializer: Initializer
    claim: Claim
    layer: int | None


class TransformerStack:
    """Makes all layers of a stack by the same stretch of the random stream."""

    name = "torch.nn stack"
    composite = False

    def __init__(self) -> None:
        self._parts: WeakKeyDictionary[nn.Module, tuple[_Part, ...]]
        self._parts = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim nothing: the stack itself owns nothing."""
        return None

    def claim_tree(self, site: ModuleSite, request: Request) -> Claim | None:
        """Claim what the initializers of the modules below claim."""
        stack = site.module
        if request.rng != "eager" or _recorded(site):
            return None
        layers: dict[int, int] = {}
        modules = getattr(stack, "layers", ())
        for index, layer in enumerate(modules):
            layers.update((id(module), index) for module in layer.modules())
        claimed: set[int] = set()
        parts = tuple(
            _Part(
                site=one, initializer=who, claim=claim, layer=layers.get(id(one.module))
            )
            for one, who, claim in _claims_below(site, request, claimed)
        )
        if not parts:
            return None
        self._parts[stack] = tuple(part for part in parts if not part.claim.problems)
        made = [slot for part in parts for slot in part.claim.slots]
        again = [slot for part in parts for slot in part.claim.rewrites]
        kind = type(stack).__name__
        inner = dict.fromkeys(text for part in parts for text in part.claim.assumptions)
        assumed = (
            f"the layer that {kind} copied was constructed right before it, and is "
            "not part of the model",
        )
        return Claim(
            slots=tuple(made),
            rewrites=tuple(again),
            source=f"{kind}: {len(modules)} copies",
            assumptions=(*assumed, *inner) if len(modules) > 1 else tuple(inner),
            problems=tuple(text for part in parts for text in part.claim.problems),
            scratch_bytes=max(part.claim.scratch_bytes for part in parts),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run the parts, with the generators put back before each further layer."""
        start: GeneratorSnapshot | None = None
        before: int | None = None
        for part in self._parts[step.site.module]:
            if part.layer is not None and part.layer != before:
                if start is None:
                    start = GeneratorSnapshot(workspace.request.device)
                else:
                    start.restore()
                before = part.layer
            inner = replace(
                step, site=part.site, initializer=part.initializer, claim=part.claim
            )
            part.initializer.run(inner, workspace)


class TransformerInit:
    """Redraws all matrices, as `nn.Transformer` does at the end of its constructor."""

    name = "torch.nn"
    composite = True

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Rewrite every deferred parameter of two dimensions or more."""
        module = site.module
        method = getattr(type(module), "_reset_parameters", None)
        if method is not nn.Transformer._reset_parameters:
            return None
        rewrites = tuple(
            slot
            for one in site.post_order()
            for slot in one.slots
            if slot.kind is SlotKind.PARAMETER
            and slot.deferred
            and slot.tensor.dim() > 1
        )
        if not rewrites:
            return None
        return Claim(rewrites=rewrites, source="Transformer._reset_parameters")

    def run(self, step: Step, workspace: Workspace) -> None:
        """Redraw in place; scratch stands in for loaded tensors."""
        module = step.site.module
        assert isinstance(module, nn.Transformer)
        with workspace.filling(step):
            module._reset_parameters()


def _claims_below(
    site: ModuleSite, request: Request, claimed: set[int]
) -> Iterator[tuple[ModuleSite, Initializer, Claim]]:
    """Ask the initializers of the modules below, as the planner does."""
    for child in site.children:
        tree = next(_tree_claims(child, request), None)
        if tree is not None:
            claimed.update(slot.tensor_id for slot in tree[1].slots)
            yield child, *tree
        else:
            yield from _claims_below(child, request, claimed)
    owner = any(slot.deferred for slot in site.slots)
    below = owner or any(s.deferred for one in site.post_order() for s in one.slots)
    last = last_initializers()
    for initializer in initializers_for(type(site.module)):
        if initializer in last or not (owner or (initializer.composite and below)):
            continue
        claim = initializer.claim(site, _pending(site, claimed), request)
        if claim is not None:
            claim = _split(claim, claimed)
            claimed.update(slot.tensor_id for slot in claim.slots)
            yield site, initializer, claim


def _tree_claims(
    site: ModuleSite, request: Request
) -> Iterator[tuple[Initializer, Claim]]:
    for initializer in tree_initializers_for(type(site.module)):
        claim = initializer.claim_tree(site, request)
        if claim is not None:
            yield initializer, claim


def _split(claim: Claim, claimed: set[int]) -> Claim:
    """Turn claims of what others make already into rewrites."""
    fresh = [slot for slot in claim.slots if slot.tensor_id not in claimed]
    again = [slot for slot in claim.slots if slot.tensor_id in claimed]
    return replace(claim, slots=tuple(fresh), rewrites=(*again, *claim.rewrites))


def _pending(site: ModuleSite, claimed: set[int]) -> tuple[Slot, ...]:
    unique: dict[int, Slot] = {}
    for slot in site.slots:
        if slot.deferred and slot.tensor_id not in claimed:
            unique.setdefault(slot.tensor_id, slot)
    return tuple(unique.values())


def _recorded(site: ModuleSite) -> bool:
    """Whether a recording knows better how the stack was constructed."""
    return any(
        value_in_place(slot.owner, slot.name, slot.tensor) is not None
        for one in site.post_order()
        for slot in one.slots
    )


add_initializer(TransformerStack(), nn.TransformerEncoder, nn.TransformerDecoder)
add_initializer(TransformerInit(), nn.Transformer)

"""Makes a plan: collects the claims of all initializers and orders them.

All claims are collected and all problems found before a single one is reported.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from deferred_init.aliases import same_elements
from deferred_init.constructor_names import forget_changed
from deferred_init.errors import PlanError
from deferred_init.forecast import peak_of
from deferred_init.handlers.checkpoint import CheckpointInitializer
from deferred_init.handlers.protocol import Claim, Initializer, Request
from deferred_init.handlers.registry import (
    construction_order,
    has_user_rule,
    initializers_for,
    last_initializers,
    tree_initializers_for,
)
from deferred_init.left_out_draws import left_out_assumptions
from deferred_init.order_assumptions import order_assumptions, tree_assumptions
from deferred_init.ordering import ordered_steps
from deferred_init.plan import Plan
from deferred_init.plan_checks import (
    kept_tokens,
    left_behind,
    misfit_shards,
    name_collisions,
    unallocatable,
    unclaimed,
)
from deferred_init.rng import BY_NAME
from deferred_init.slots import Inventory, ModuleSite, Slot
from deferred_init.value_assumptions import value_assumptions

__all__ = ["make_plan"]


def make_plan(
    inventory: Inventory,
    request: Request,
    known_problems: Sequence[str] = (),
    weights: CheckpointInitializer | None = None,
) -> Plan:
    """Collect the claims of all initializers.

    Args:
        inventory: What there is.
        request: What is asked for.
        known_problems: Found by earlier checks; reported together with the rest.
        weights: Fills what a checkpoint has.

    Raises:
        PlanError: If anything is unclaimed or impossible; lists all of it.
    """
    if weights is not None:
        request = replace(request, draws_unneeded=weights.draws_all)
    request = replace(request, roots=inventory.roots)
    forget_changed(type(site.module) for site in inventory.sites())
    claims = _Claims(inventory, request, weights)
    needed = _deferred_by_site(inventory)
    if not claims.take_leaves():
        for root in inventory.roots:
            claims.ask_for_trees(root, needed)
    for site in inventory.sites():
        if site in needed:
            claims.ask(site, needed[site])
    claims.take_weights()
    deferred = inventory.deferred
    problems = [*known_problems, *claims.problems]
    problems += unclaimed(inventory, deferred, claims.claimed)
    problems += unallocatable(deferred, request)
    problems += kept_tokens(inventory)
    problems += misfit_shards(inventory, (claim for _, _, claim in claims.found))
    if request.rng in BY_NAME:
        problems += name_collisions(deferred, request)
    if problems:
        raise PlanError(_message(problems), problems)
    steps = ordered_steps(claims.found, inventory, request)
    final_bytes = sum(step.num_bytes for step in steps)
    return Plan(
        request=request,
        inventory=inventory,
        steps=steps,
        notes=(*left_behind(inventory, deferred), *claims.notes),
        assumptions=(
            *dict.fromkeys(text for step in steps for text in step.claim.assumptions),
            *order_assumptions(steps),
            *tree_assumptions(steps, inventory),
            *value_assumptions(steps, inventory, deferred),
            *left_out_assumptions(steps, request.rng),
        ),
        final_bytes=final_bytes,
        scratch_bytes=peak_of(steps, inventory, request)[0] - final_bytes,
    )


class _Claims:
    """Claims collected so far."""

    def __init__(
        self,
        inventory: Inventory,
        request: Request,
        weights: CheckpointInitializer | None,
    ) -> None:
        self.found: list[tuple[ModuleSite, Initializer, Claim]] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.claimed: set[int] = set()
        self._trees: dict[ModuleSite, tuple[Initializer, Claim]] = {}
        self._covered: set[ModuleSite] = set()
        self._settled: set[int] = set()
        self._open: set[ModuleSite] = set()
        self._inventory = inventory
        self._request = request
        self._weights = weights
        self._last = last_initializers()
        self._reserved = set() if weights is None else weights.reserved()
        self.claimed |= self._reserved
        self._settled |= self._reserved

    def take_leaves(self) -> bool:
        """Where weights are loaded, see if modules by themselves can make the rest.

        Then nobody needs to know how the whole was constructed, as transformers'
        loader does not for rotary embeddings.
        """
        if not self._reserved:
            return False
        found: list[tuple[ModuleSite, Initializer, Claim]] = []
        for site in self._inventory.sites():
            pending = self._pending([s for s in site.slots if s.deferred])
            if not pending:
                continue
            claims = (
                (site, initializer, claim)
                for initializer in initializers_for(type(site.module))
                if getattr(initializer, "self_contained", False)
                and (claim := initializer.claim(site, pending, self._request))
                and set(claim.slots) == set(pending)
            )
            first = next(claims, None)
            if first is None:
                return False
            found.append(first)
        for site, initializer, claim in found:
            self._take(site, initializer, replace(claim, settled=True))
        return True

    def take_weights(self) -> None:
        """Take what a checkpoint fills; what is reserved for it becomes its own."""
        if self._weights is None:
            return
        self.claimed -= self._reserved
        self._reserved = set()
        unfit = (target.slot.tensor for target in self._weights.matches.unfit)
        self.claimed.update(map(id, unfit))  # told once, as what they are
        self.problems.extend(self._weights.matches.problems)
        self.notes.extend(self._weights.matches.notes)
        made = [claim for _, _, claim in self.found]
        for site, claim in self._weights.claims(made):
            self._take(site, self._weights, claim)

    def ask_for_trees(self, root: ModuleSite, needed: Container[ModuleSite]) -> None:
        """Ask those who know whole subtrees, parents before children."""
        stack = [root]
        while stack:
            site = stack.pop()
            if site not in needed:
                continue
            found = self._tree_claim(site)
            if found is None:
                stack.extend(reversed(site.children))
            else:
                self._trees[site] = found
                self._covered.update(site.post_order())

    def _tree_claim(self, site: ModuleSite) -> tuple[Initializer, Claim] | None:
        for initializer in tree_initializers_for(type(site.module)):
            claim = initializer.claim_tree(site, self._request)
            if claim is None:
                continue
            kinds = {type(below.module) for below in site.post_order()}
            if not any(map(has_user_rule, kinds)):
                return initializer, claim
        return None

    def ask(self, site: ModuleSite, deferred: Sequence[Slot]) -> None:
        """Ask the initializers of one module's type, most specific first."""
        tree = self._trees.get(site)
        if tree is not None:
            self._take(site, *tree)
        elif site in self._covered:
            return
        asked = self._last if tree else initializers_for(type(site.module))
        pending = self._pending(deferred)
        settled = self._is_settled(site, deferred)
        for initializer in asked:
            if not deferred and not initializer.composite:
                continue
            if settled and initializer not in self._last:
                continue
            claim = initializer.claim(site, pending, self._request)
            if claim is not None:
                self._take(site, initializer, claim)
                pending = self._pending(pending)
                if claim.settled:
                    settled = self._is_settled(site, deferred)
        unsettled_tree = tree is not None and not tree[1].settled
        if unsettled_tree or not settled:
            self._open.add(site)

    def _is_settled(self, site: ModuleSite, deferred: Sequence[Slot]) -> bool:
        """Whether nothing at or below a module is open to ordinary initializers."""
        if construction_order(site.module) is not None:
            return False  # left to itself: it draws also where all of it is tied
        for slot in deferred:
            if slot.tensor_id not in self._settled:
                return False
        return self._open.isdisjoint(site.children)

    def _take(self, site: ModuleSite, initializer: Initializer, claim: Claim) -> None:
        made = {slot.tensor_id for slot in claim.slots}
        alone = len(made) == len(claim.slots) and made.isdisjoint(self.claimed)
        if claim.rewrites or not alone:
            last = initializer is self._weights or initializer in self._last
            claim = self._normalize(claim, last=last)
            if not (claim.slots or claim.rewrites):
                return  # all of it is loaded
            made = {slot.tensor_id for slot in claim.slots}
        self.problems.extend(claim.problems)
        self.claimed |= made
        if claim.settled:
            self._settled |= made
        if not claim.problems:
            self.found.append((site, initializer, claim))

    def _normalize(self, claim: Claim, *, last: bool) -> Claim:
        """Turn claims of what others make already, if not settled, into rewrites."""
        fresh: dict[int, Slot] = {}
        again: dict[int, Slot] = {}
        for slot in claim.slots:
            target = again if slot.tensor_id in self.claimed else fresh
            target.setdefault(slot.tensor_id, slot)
        for slot in claim.rewrites:
            if slot.tensor_id not in fresh:
                again.setdefault(slot.tensor_id, slot)
        for key in self._reserved if last else self._reserved | self._settled:
            again.pop(key, None)
        return replace(
            claim, slots=tuple(fresh.values()), rewrites=tuple(again.values())
        )

    def _pending(self, deferred: Sequence[Slot]) -> tuple[Slot, ...]:
        """Those of a module's deferred slots that nobody has claimed, once a tensor."""
        if not deferred:
            return ()
        unique: dict[int, Slot] = {}
        for slot in deferred:
            if slot.tensor_id not in self.claimed and not self._has_claimed_twin(slot):
                unique.setdefault(slot.tensor_id, slot)
        return tuple(unique.values())

    def _has_claimed_twin(self, slot: Slot) -> bool:
        """Whether another Parameter object of the same elements is made already.

        `accelerate.init_empty_weights` turns ties into such twins; like a tie, the
        memory keeps the values that it was given first.
        """
        members = self._inventory.groups[slot.tensor_id].members
        return len(members) > 1 and any(
            id(one) in self.claimed and same_elements(one, slot.tensor)
            for one in members
        )


def _deferred_by_site(inventory: Inventory) -> dict[ModuleSite, list[Slot]]:
    """The deferred slots of sites that own some, or have a descendant that does."""
    needed: dict[ModuleSite, list[Slot]] = {}
    for site in inventory.sites():
        deferred = [slot for slot in site.slots if slot.deferred]
        if deferred or not needed.keys().isdisjoint(site.children):
            needed[site] = deferred
    return needed


def _message(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    shown = "\n".join(f"  - {problem}" for problem in problems[:10])
    more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
    return f"{len(problems)} problems; nothing was changed:\n{shown}{more}"

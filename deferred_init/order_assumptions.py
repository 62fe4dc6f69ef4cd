"""Says where the order of construction cannot be read off a module tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from torch import nn
from torch.nn.modules.conv import _ConvNd

from deferred_init.constructor_code import assigned_after, passed_in, stored_twice
from deferred_init.constructor_names import init_methods
from deferred_init.errors import listing
from deferred_init.handlers.protocol import Step
from deferred_init.slots import Inventory, ModuleSite

__all__ = ["order_assumptions", "tree_assumptions"]

_RECORD = "; where not, build the model inside `deferred_init(...)`"
_DRAWING = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase)
_LISTS = (nn.ModuleList, nn.ModuleDict)


def tree_assumptions(steps: Sequence[Step], inventory: Inventory) -> tuple[str, ...]:
    """Say where the tree may mislead about what constructors did, and when."""
    drawn = _drawn(steps)
    if not drawn:
        return ()
    lasting = _lasting(steps)
    return (
        *_list_assumptions(drawn, lasting, inventory),
        *_constructor_assumptions(drawn, lasting, inventory),
        *_real_assumptions(drawn, inventory),
    )


def _list_assumptions(
    drawn: Set[ModuleSite], lasting: Set[ModuleSite], inventory: Inventory
) -> tuple[str, ...]:
    """Name classes with several lists of modules, which one loop may have filled.

    A block that appends to plain lists in turn, and registers them as a `ModuleList`
    each at the end, leaves the same tree as one that fills list after list.
    """
    found: dict[str, list[str]] = {}
    for site in inventory.sites():
        lists = [one for one in site.children if isinstance(one.module, _LISTS)]
        kind = type(site.module)
        known = kind.__module__.startswith("torch.nn.") or kind.__qualname__ in found
        if len(lists) > 1 and not known:
            names = [one.fqn.rpartition(".")[2] for one in lists if _any(one, drawn)]
            if len(names) > 1 and any(_any(one, lasting) for one in lists):
                found[kind.__qualname__] = names
    return tuple(
        f"the modules in {listing(names)} of {kind} were constructed list after list; "
        "where one loop constructed them in turn, build the model inside "
        "`deferred_init(...)`"
        for kind, names in found.items()
    )


def _constructor_assumptions(
    drawn: Set[ModuleSite], lasting: Set[ModuleSite], inventory: Inventory
) -> tuple[str, ...]:
    """Name classes whose constructors did not make the children one after the other."""
    found: dict[str, None] = {}
    for site in inventory.sites():
        kind = type(site.module)
        if kind.__module__.startswith("torch.nn.") or not _is_told_of(kind):
            continue
        children = {
            child.fqn.rpartition(".")[2]: _any(child, lasting)
            for child in site.children
            if _any(child, drawn)
        }
        if children:
            held = [name for name, _ in site.module.named_children()]
            found.update(dict.fromkeys(_order_in(kind, children, held)))
    return tuple(found)


def _is_told_of(kind: type) -> bool:
    """Whether its constructors tell anything that `_order_in` asks for."""
    methods, certain = init_methods(kind)
    return bool(
        passed_in(kind)
        or stored_twice(kind)
        or (certain and any(assigned_after(kind, method) for method in methods))
    )


def _real_assumptions(drawn: Set[ModuleSite], inventory: Inventory) -> tuple[str, ...]:
    """Name modules that are real already and stand before others that draw numbers."""
    before: list[str] = []
    waiting: list[str] = []
    for site in inventory.sites():
        if site in drawn and isinstance(site.module, _DRAWING):
            before += waiting
            waiting = []
        elif isinstance(site.module, _DRAWING) and _is_real(site):
            waiting.append(site.fqn)
    if not before:
        return ()
    return (
        f"{listing(before)}, with memory already, drew no random numbers; where eager "
        "construction drew them before what comes after, load them with `weights=` "
        "instead, or build the model inside `deferred_init(...)`",
    )


def _is_real(site: ModuleSite) -> bool:
    return bool(site.slots) and not any(slot.deferred for slot in site.slots)


def _order_in(
    kind: type, children: Mapping[str, bool], held: Sequence[str]
) -> Iterator[str]:
    """Say what the constructors of a class tell against the order of its children.

    Args:
        kind: The class.
        children: Children that draw random numbers, in the order of the tree, and
            whether any value that they draw stays.
        held: All children.
    """
    order = list(children)
    passed = [name for name in order if name in passed_in(kind)]
    moved = order[: order.index(passed[-1]) + 1] if passed else []
    if moved != passed and any(children[name] for name in moved):
        yield (
            f"{listing(passed)} of {kind.__qualname__}, which its constructor was "
            "given, is taken to be constructed after the children before it"
            f"{_RECORD}"
        )
    twice = [name for name in held if name in stored_twice(kind)]
    if twice:
        yield (
            f"{listing(twice)} of {kind.__qualname__} stands in the place of what a "
            "base class had assigned there, and that one drew no random numbers"
            f"{_RECORD}"
        )
    methods, certain = init_methods(kind)
    for method in methods if certain else ():
        late = [name for name in children if name in assigned_after(kind, method)]
        if late:
            yield (
                f"{listing(late)} of {kind.__qualname__} was constructed before "
                f"`{method}` ran, though the constructor calls it first{_RECORD}"
            )


def _drawn(steps: Sequence[Step]) -> set[ModuleSite]:
    """Modules of torch whose place in the order is that of the tree."""
    return {
        step.site
        for step in steps
        if step.order is None and step.initializer.name == "torch.nn"
    }


def _lasting(steps: Sequence[Step]) -> set[ModuleSite]:
    """Modules that keep a value which they draw: it is no constant, nor drawn again."""
    again = {slot.tensor_id for step in steps for slot in step.claim.rewrites}
    return {
        step.site
        for step in steps
        if step.initializer.name != "torch.nn" or isinstance(step.site.module, _DRAWING)
        if any(slot.tensor_id not in again for slot in step.claim.slots)
    }


def _any(site: ModuleSite, sites: Set[ModuleSite]) -> bool:
    return any(below in sites for below in site.post_order())


def order_assumptions(steps: Sequence[Step]) -> tuple[str, ...]:
    """Name modules whose place among the others had to be assumed.

    `vars(module)` keeps the order of plain attributes and `_modules` that of the
    registered ones, but nothing keeps the order between the two.
    """
    unplaced = [step.site for step in steps if step.order is None]
    outside = [site.fqn for site in unplaced if not site.registered]
    if not outside or len(outside) == len(unplaced):
        return ()
    return (
        f"{listing(list(dict.fromkeys(outside)))}, which no module has registered, "
        "were constructed after the registered modules of the same owner",
    )

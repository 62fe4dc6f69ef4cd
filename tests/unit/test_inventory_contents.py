"""What the inventory may leave out: objects that lead to no tensor."""

from __future__ import annotations

import collections
import dataclasses
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from deferred_init import module_attributes
from deferred_init.inventory import take_inventory
from deferred_init.object_contents import lead_nowhere
from tests.unit.healthy_models import HEALTHY
from tests.unit.holders import Plain, Text, with_attribute


class _InSlots:
    __slots__ = ("held", "unset")

    def __init__(self, held: object) -> None:
        self.held = held


class _InSlotsToo(_InSlots):
    """Has a `__dict__` beside what its base keeps in slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Frozen:
    number: int
    held: object


class _Pair(NamedTuple):
    name: str
    held: object


class _MakesItems(Mapping[str, object]):
    """A mapping that the collector of garbage sees nothing in."""

    def __init__(self, held: object) -> None:
        self._held = lambda: held

    def __getitem__(self, key: str) -> object:
        return self._held()

    def __iter__(self) -> Iterator[str]:
        return iter(["key"])

    def __len__(self) -> int:
        return 1


class _MakesMembers(list[object]):
    """A list that gives others than it holds."""

    def __init__(self, held: object) -> None:
        super().__init__([1])
        self._held = lambda: held

    def __iter__(self) -> Iterator[object]:
        return iter([self._held()])


HOLDERS: dict[str, Callable[[object], object]] = {
    "a list": lambda held: [1, held],
    "a tuple": lambda held: (held,),
    "a named tuple": lambda held: _Pair("a", held),
    "a dict": lambda held: {"key": held},
    "a key": lambda held: {"a": 1, held: 2},
    "a tuple that is a key": lambda held: {(1, held): 2},
    "an object that is a key": lambda held: {Plain(held): 2},
    "a set": lambda held: {held},
    "a frozenset": lambda held: frozenset([held]),
    "an ordered dict": lambda held: collections.OrderedDict(key=held),
    "a default dict": lambda held: collections.defaultdict(list, key=held),
    "a namespace": lambda held: types.SimpleNamespace(held=held),
    "a plain object": Plain,
    "an object with slots": _InSlots,
    "an object with slots and a dict": _InSlotsToo,
    "a dict beside slots": lambda held: with_attribute(_InSlotsToo(1), [held]),
    "a frozen dataclass with slots": lambda held: _Frozen(1, held),
    "a text with attributes": lambda held: with_attribute(Text("a"), held),
    "a mapping with methods of its own": _MakesItems,
    "a list with methods of its own": _MakesMembers,
    "several steps": lambda held: {"a": [Plain((held,))]},
}


def _layers(number: int = 100) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(number)))
    for layer in model:
        layer.settings = {"names": ["a", "b"], "sizes": (3, 4)}
        layer.other = Plain(None)
    return model


@pytest.mark.parametrize("how", HOLDERS)
def test_what_one_module_among_many_holds_is_found(how: str) -> None:
    model = _layers()
    held = torch.zeros(1)
    model[70].settings = HOLDERS[how](held)
    found = [slot for slot in take_inventory([model]).slots if slot.tensor is held]
    assert [slot.owner_fqn for slot in found] == ["70"]
    assert found[0].name.startswith("settings")
    hidden = nn.Linear(1, 1)
    model[70].settings = HOLDERS[how](hidden)
    sites = [site for site in take_inventory([model]).sites() if site.module is hidden]
    assert [(site.fqn.split(".")[0], site.registered) for site in sites] == [
        ("70", False)
    ]


@pytest.mark.parametrize("how", HOLDERS)
def test_nothing_is_found_where_nothing_is(how: str) -> None:
    model = _layers()
    model[70].settings = HOLDERS[how]("nothing")
    slots = take_inventory([model]).slots
    assert {slot.name for slot in slots} == {"weight", "bias"}


def test_keys_have_names_of_their_own_and_weak_ones_are_left_to_who_holds_them() -> (
    None
):
    model = nn.Linear(1, 1, bias=False)
    first, second = torch.zeros(1), torch.zeros(1)
    model.table = {"a": first, (1, 2): 3, second: 4}
    model.weak = weakref.WeakKeyDictionary({Plain(torch.zeros(1)): 1})
    model.weak_tensors = WeakTensorKeyDictionary({torch.zeros(1): 1})
    names = [slot.fqn for slot in take_inventory([model]).slots]
    assert names == ["weight", "table['a']", "table.keys()[2]"]


@pytest.mark.parametrize("kind", [_InSlots, _InSlotsToo, partial(_Frozen, 1)])
def test_a_place_in_an_object_with_slots_can_be_read_and_written(
    kind: Callable[[object], Any],
) -> None:
    model, before, after = nn.Module(), torch.zeros(1), torch.ones(1)
    model.outer = kind(before)
    (slot,) = take_inventory([model]).slots
    assert slot.fqn == "outer.held"
    assert slot.read() is before
    slot.write(after)
    assert model.outer.held is after
    assert slot.read() is after


def test_circles_and_loggers_lead_nowhere() -> None:
    circle: list[object] = [logging.getLogger("deferred_init"), print]
    circle.append({"back": circle})
    assert lead_nowhere(circle)
    circle.append([torch.zeros(1)])
    assert not lead_nowhere(circle)


def test_an_attribute_that_changes_its_type_is_looked_at() -> None:
    model = _layers(2)
    model[0].extra, model[1].extra = 3, 4
    assert len(take_inventory([model]).slots) == 4
    model[1].extra = torch.zeros(1)  # type: ignore[assignment]
    names = [slot.fqn for slot in take_inventory([model]).slots]
    assert names[-1] == "1.extra"


@pytest.mark.parametrize("name", HEALTHY)
def test_the_inventory_is_the_same_as_if_nothing_were_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = HEALTHY[name]().models

    def slots() -> list[tuple[str, object, int]]:
        found = take_inventory(models).slots
        return [(slot.fqn, slot.kind, id(slot.tensor)) for slot in found]

    short = slots()
    monkeypatch.setattr(module_attributes, "lead_nowhere", lambda values: False)
    assert slots() == short

"""What the audit's walk may leave out: objects that lead to no tensor."""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deferred_init.audit.barren import Barren
from deferred_init.audit.graph import look
from deferred_init.audit.kinds import Kind, kind_of, parts_of
from tests.unit.healthy_models import HEALTHY
from tests.unit.holders import Plain, Text, with_attribute


class _Slots:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class _Both(_Slots):
    """Slots of the base class, and an instance dict."""


class _Number(int):
    """A subclass of an atom, which has attributes."""


class _List(list[object]):
    pass


class _Dict(dict[str, object]):
    pass


class _Silent:
    """Says no to whoever asks it anything."""

    def __init__(self, held: object) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __iter__(self) -> Any:
        raise RuntimeError("iter")


@dataclass
class _Data:
    held: object


@dataclass(slots=True)
class _SlottedData:
    held: object


def _closure(held: object) -> Callable[[], object]:
    return lambda: held


def _default(held: object) -> Callable[[], object]:
    def function(value: object = held) -> object:
        return value

    return function


def _keyword(held: object) -> Callable[[], object]:
    def function(*, value: object = held) -> object:
        return value

    return function


HOLDERS: dict[str, Callable[[object], object]] = {
    "a list": lambda held: [held],
    "a tuple": lambda held: (held,),
    "a dict": lambda held: {"key": held},
    "a key": lambda held: {"a": 1, held: 2},
    "a tuple that is a key": lambda held: {(1, held): 2},
    "a set": lambda held: {held},
    "a frozenset": lambda held: frozenset([held]),
    "an ordered dict": lambda held: collections.OrderedDict(key=held),
    "a default dict": lambda held: collections.defaultdict(list, key=held),
    "a deque": lambda held: collections.deque([held]),
    "a proxy": lambda held: types.MappingProxyType({"key": held}),
    "a namespace": lambda held: types.SimpleNamespace(held=held),
    "a plain object": Plain,
    "an object with slots": _Slots,
    "an object with both": lambda held: with_attribute(_Both(None), held),
    "slots beside a dict": _Both,
    "a subclass of list": lambda held: _List([held]),
    "an attribute of a list": lambda held: with_attribute(_List(), held),
    "a subclass of dict": lambda held: _Dict(key=held),
    "an attribute of a dict": lambda held: with_attribute(_Dict(), held),
    "an object that does not answer": _Silent,
    "a dataclass": _Data,
    "a dataclass with slots": _SlottedData,
    "a closure": _closure,
    "a default": _default,
    "a default of a keyword": _keyword,
    "an attribute of a function": lambda held: with_attribute(_closure(1), held),
    "a bound method": lambda held: Plain(held).method,
    "a partial": lambda held: functools.partial(print, held),
    "a keyword of a partial": lambda held: functools.partial(print, end=held),
    "several steps": lambda held: [{"a": (Plain([_closure(held)]),)}],
}


def _is_barren(value: object) -> bool:
    return Barren().lead_nowhere([value], set())


@pytest.mark.parametrize("how", HOLDERS)
def test_what_holds_a_tensor_or_a_module_is_never_called_barren(how: str) -> None:
    make = HOLDERS[how]
    for held in (torch.zeros(1), nn.Parameter(torch.zeros(1)), nn.Linear(1, 1)):
        assert not _is_barren(make(held))
        assert not _is_barren([make(1), make("a"), make(held)])
    assert _is_barren(make("nothing"))
    assert _is_barren(make(Plain([None])))


@pytest.mark.parametrize("how", HOLDERS)
def test_the_collector_finds_all_that_the_walk_would_find(how: str) -> None:
    value = HOLDERS[how](torch.zeros(1))
    kind = kind_of(value)
    assert kind is not Kind.ATOM
    if kind is not Kind.FUNCTION:
        known = {id(each) for each in _reachable(value)}
        assert all(id(part) in known for _, part in parts_of(value, kind))


def _reachable(value: object) -> list[object]:
    """Two levels, as instance dicts and cells may stand between."""
    first = gc.get_referents(value)
    return [*first, *gc.get_referents(*first)]


def test_a_tensor_is_found_behind_a_text_or_a_number_that_has_attributes() -> None:
    model = nn.Linear(1, 1)
    hidden = torch.zeros(1)
    model.text = with_attribute(Text("a"), hidden)
    model.settings = {"number": with_attribute(_Number(3), hidden)}
    found = [place.name for place in look([model]).places if place.tensor is hidden]
    assert found == ["text.held", "settings['number'].held"]
    assert _is_barren([Text("a"), _Number(3), 3, "a"])


def test_circles_end_and_what_was_seen_needs_no_second_look() -> None:
    circle: list[object] = [1]
    circle.append({"back": circle})
    assert _is_barren(circle)
    hidden = nn.Linear(1, 1)
    circle.append(hidden)
    assert not _is_barren(circle)
    assert Barren().lead_nowhere([circle], {id(hidden)})


def test_a_failed_look_leaves_nothing_behind() -> None:
    shared, barren = [torch.zeros(1)], Barren()
    inner = {"a": shared}
    for _ in range(2):
        assert not barren.lead_nowhere([inner], set())
        assert not barren.lead_nowhere([[inner]], set())


def test_one_module_among_many_that_holds_a_tensor_is_found() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(200)))
    for layer in model:
        layer.settings = {"names": ["a", "b"], "size": 3}
    hidden: Tensor = torch.zeros(1)
    model[137].settings["names"].append(hidden)
    names = [place.fqn for place in look([model]).places if place.kind == "attribute"]
    assert names == ["137.settings['names'][2]"]
    # The same names and types of attributes: their values decide all the same.
    model[12].settings = {"names": [hidden]}
    names = [place.fqn for place in look([model]).places if place.kind == "attribute"]
    assert names == ["12.settings['names'][0]", "137.settings['names'][2]"]


def test_an_attribute_that_changes_its_type_is_looked_at() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    one.extra, other.extra = 3, 4
    assert not [p for p in look([one]).places if p.kind == "attribute"]
    other.extra = torch.zeros(1)  # type: ignore[assignment]
    assert [p.name for p in look([other]).places if p.kind == "attribute"] == ["extra"]


@pytest.mark.parametrize("name", HEALTHY)
def test_the_walk_finds_the_same_as_if_nothing_were_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = HEALTHY[name]()

    def places() -> list[tuple[str, str, int]]:
        found = look(case.models, case.optimizers, case.holders).places
        return [(place.fqn, place.kind, id(place.tensor)) for place in found]

    short = places()
    monkeypatch.setattr(Barren, "lead_nowhere", lambda self, values, seen: False)
    assert places() == short

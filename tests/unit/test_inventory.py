"""The inventory finds every place that holds a tensor, once each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deferred_init.aliases import byte_span, group_by_storage, storage_key
from deferred_init.inventory import take_inventory
from deferred_init.slots import SlotKind


class Hoarder(nn.Module):
    """Holds tensors in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, device="meta")
        self.tied = self.inner.weight
        self.register_buffer("kept", torch.empty(3, device="meta"))
        self.register_buffer("lost", torch.empty(3, device="meta"), persistent=False)
        self.plain = torch.empty(1, device="meta")
        self.tables = {"a": [torch.empty(1, device="meta")]}
        self.hidden = [nn.Linear(1, 1, device="meta")]
        self.bag = SimpleNamespace(t=torch.empty(1, device="meta"))
        self.pair = (torch.empty(1, device="meta"), 3)
        self.inner.weight.main_grad = torch.empty(2, 2, device="meta")
        self.myself = self


def test_every_way_to_hold_a_tensor_is_found_under_a_readable_name() -> None:
    inventory = take_inventory([Hoarder()])
    kinds = {slot.fqn: slot.kind for slot in inventory.slots}
    assert kinds == {
        "tied": SlotKind.PARAMETER,
        "tied.main_grad": SlotKind.TENSOR_ATTRIBUTE,
        "kept": SlotKind.BUFFER,
        "lost": SlotKind.BUFFER,
        "plain": SlotKind.ATTRIBUTE,
        "tables['a'][0]": SlotKind.ATTRIBUTE,
        "bag.t": SlotKind.ATTRIBUTE,
        "pair[0]": SlotKind.ATTRIBUTE,
        "inner.weight": SlotKind.PARAMETER,
        "inner.bias": SlotKind.PARAMETER,
        "hidden[0].weight": SlotKind.PARAMETER,
        "hidden[0].bias": SlotKind.PARAMETER,
    }


def test_each_slot_reads_and_writes_its_own_place() -> None:
    model = Hoarder()
    for slot in take_inventory([model]).slots:
        assert slot.read() is slot.tensor
        if slot.fqn == "pair[0]":
            continue
        other = nn.Parameter(torch.ones(1))
        slot.write(other)
        assert slot.read() is other


def test_writing_into_a_tuple_is_refused_by_name() -> None:
    model = Hoarder()
    (slot,) = (s for s in take_inventory([model]).slots if s.fqn == "pair[0]")
    with pytest.raises(TypeError, match=r"`pair\[0\]` is an item of an immutable"):
        slot.write(torch.ones(1))


def test_persistence_of_buffers_is_noted() -> None:
    slots = {slot.fqn: slot for slot in take_inventory([Hoarder()]).slots}
    assert slots["kept"].persistent
    assert not slots["lost"].persistent


def test_a_tie_is_two_slots_of_one_tensor_and_is_deferred_once() -> None:
    model = Hoarder()
    inventory = take_inventory([model])
    held = inventory.slots_of(model.inner.weight)
    assert [slot.fqn for slot in held] == ["tied", "inner.weight"]
    assert sum(s.tensor is model.inner.weight for s in inventory.deferred) == 1


def test_models_of_a_list_are_told_apart_and_shared_modules_listed_once() -> None:
    shared = nn.Linear(1, 1, device="meta")
    inventory = take_inventory([nn.Sequential(shared), nn.Sequential(shared)])
    assert [slot.fqn for slot in inventory.slots] == [
        "model[0].0.weight",
        "model[0].0.bias",
    ]


def test_sites_come_children_first_even_in_a_very_deep_chain() -> None:
    top = nn.Sequential()
    for _ in range(3000):
        top = nn.Sequential(top)
    sites = list(take_inventory([top]).sites())
    assert len(sites) == 3001
    assert sites[-1].module is top


def test_views_on_meta_are_told_apart_from_strangers() -> None:
    base = torch.empty(8, device="meta")
    view, stranger = base[2:6], torch.empty(8, device="meta")
    assert storage_key(base) == storage_key(view) != storage_key(stranger)
    groups = group_by_storage([base, view, stranger])
    assert groups[id(base)].shared
    assert [id(t) for t in groups[id(base)].members] == [id(base), id(view)]
    assert not groups[id(stranger)].shared


def test_a_slice_whose_base_is_gone_still_counts_as_shared_storage() -> None:
    lonely = torch.empty(8, device="meta")[:4]
    group = group_by_storage([lonely])[id(lonely)]
    assert group.shared
    assert group.num_bytes == 32


def test_byte_span_follows_strides_and_offset() -> None:
    base = torch.empty(4, 4)
    assert byte_span(base) == (0, 64)
    assert byte_span(base[1:3, 1]) == (20, 40)
    assert byte_span(base[:0]) == (0, 0)

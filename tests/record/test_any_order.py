"""Any order, any subset, any shard: the same bits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from deferred_init.record import (
    Replay,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
    recording_of,
    value_of,
)


class Mixed(nn.Module):
    """Draws of many kinds, views, ties, a seed and a rewind."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.early = nn.Parameter(torch.full((2,), torch.rand(3).max().item()))
        base = torch.rand(4, 4)
        self.register_buffer("base", base)
        self.register_buffer("part", base[1:3])
        base.mul_(torch.rand(4))
        self.counts = nn.Parameter(torch.poisson(torch.rand(6) * 5))
        self.b = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
        torch.manual_seed(99)
        self.c = nn.Linear(3, 3)
        state = torch.get_rng_state()
        self.d = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.e = nn.Linear(3, 3)
        self.tied = self.e.weight
        nn.init.trunc_normal_(self.a.weight)
        generator = torch.Generator().manual_seed(8)
        self.f = nn.Parameter(torch.randn(4, generator=generator))
        self.g = nn.Parameter(torch.randn(4, generator=generator))
        self.big = nn.Parameter(torch.randn(600, 600))
        self.last = nn.Parameter(torch.rand(3) * self.big.detach()[0, :3])


def eager() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return dict(Mixed().state_dict())


EXPECTED = eager()
NAMES = list(EXPECTED)


def recorded() -> Mixed:
    torch.manual_seed(5)
    return deferred_init(Mixed)


@settings(max_examples=25, deadline=None)
@given(st.permutations(NAMES), st.integers(1, len(NAMES)))
def test_tensors_made_one_by_one_in_any_order_have_eagers_bits(order, count):
    model = recorded()
    state = torch.get_rng_state()
    tensors = model.state_dict(keep_vars=True)
    for name in order[:count]:
        materialize_tensor(tensors[name])
        assert torch.equal(tensors[name], EXPECTED[name]), name
        assert torch.equal(torch.get_rng_state(), state)
    real = {id(tensors[name]) for name in order[:count]}
    for name, tensor in tensors.items():
        assert is_deferred(tensor) == (id(tensor) not in real), name
    if not is_deferred(model.base) and not is_deferred(model.part):
        assert model.base[1].data_ptr() == model.part.data_ptr()


@settings(max_examples=15, deadline=None)
@given(st.permutations(["a", "b", "c", "d", "e"]))
def test_submodules_materialized_in_any_order_have_eagers_bits(order):
    model = recorded()
    for name in order:
        materialize_module(getattr(model, name))
    materialize_module(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, EXPECTED[name]), name


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_kept_of_tensors_as_they_become_ready_make_up_the_whole(num_shards):
    model = recorded()
    recording = recording_of(model)
    values = {name: value_of(t) for name, t in model.state_dict(keep_vars=True).items()}
    shards: dict[str, list[torch.Tensor]] = {name: [] for name in values}
    for rank in range(num_shards):
        replay = Replay(recording, wanted=values.values())
        kept = {}

        def keep(value, tensor, kept=kept, rank=rank):
            flat = tensor.flatten().tensor_split(num_shards)[rank]
            kept[value] = flat.clone()

        replay.run(on_ready=keep)
        replay.finish(keep_generators=False)
        for name, value in values.items():
            shards[name].append(kept[value])
    for name, parts in shards.items():
        whole = torch.cat(parts).view(EXPECTED[name].shape)
        assert torch.equal(whole, EXPECTED[name]), name


@settings(max_examples=20, deadline=None)
@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_an_ordered_replay_of_a_subset_leaves_eagers_final_state(subset):
    model = recorded()
    torch.manual_seed(5)
    Mixed()
    final = torch.get_rng_state()
    torch.manual_seed(5)
    values = {n: value_of(model.state_dict(keep_vars=True)[n]) for n in subset}
    replay = Replay(recording_of(model), wanted=values.values())
    replay.run()
    made = {value: replay.take(value) for value in set(values.values())}
    for name, value in values.items():
        assert torch.equal(made[value], EXPECTED[name]), name
    replay.finish()
    assert torch.equal(torch.get_rng_state(), final)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=4))
def test_a_replay_may_stop_anywhere_and_go_on(stops):
    model = recorded()
    recording = recording_of(model)
    values = {n: value_of(t) for n, t in model.state_dict(keep_vars=True).items()}
    replay = Replay(recording, wanted=values.values())
    for stop in sorted(stops):
        replay.run(upto=min(stop, len(recording.nodes)))
    replay.run()
    made = {value: replay.take(value) for value in set(values.values())}
    for name, value in values.items():
        assert torch.equal(made[value], EXPECTED[name]), name
    replay.finish(keep_generators=False)


def test_draws_of_others_at_a_mark_come_at_their_place_in_the_order():
    def build(own):
        first = nn.Linear(3, 3)
        middle = own()
        return nn.ModuleList([first, middle, nn.Linear(3, 3)])

    torch.manual_seed(1)
    expected = build(lambda: nn.Linear(4, 4))
    final = torch.get_rng_state()

    from deferred_init.record.patches import active

    def stranger():
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        active.recorder.recording.mark(module)
        return module

    torch.manual_seed(1)
    model = deferred_init(build, stranger)
    recording = recording_of(model)
    outer = [model[0].weight, model[0].bias, model[2].weight, model[2].bias]
    replay = Replay(recording, wanted=[value_of(t) for t in outer])
    (mark,) = recording.marks
    replay.run(upto=mark)
    mark.payload.to_empty(device="cpu").reset_parameters()
    replay.run()
    made = [replay.take(value_of(t)) for t in outer]
    replay.finish()
    wanted = [expected[0].weight, expected[0].bias]
    wanted += [expected[2].weight, expected[2].bias]
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    assert torch.equal(model[1].weight, expected[1].weight)
    assert torch.equal(torch.get_rng_state(), final)


def test_seeds_by_name_do_not_depend_on_the_subset():
    model = recorded()
    recording = recording_of(model)
    names = {value_of(model.big).storage: 1, value_of(model.c.weight).storage: 2}

    def seed_of(node):
        touched = [*node.writes, *(out.storage for out in node.outs if out)]
        return next((names[s] for s in touched if s in names), 0)

    state = torch.get_rng_state()
    both = Replay(
        recording,
        wanted=[value_of(model.big), value_of(model.c.weight)],
        before_random=seed_of,
    )
    both.run()
    together = both.take(value_of(model.c.weight))
    both.finish()
    alone = Replay(recording, before_random=seed_of).value(value_of(model.c.weight))
    assert torch.equal(together, alone)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(
        Replay(recording, before_random=seed_of).value(value_of(model.big)),
        torch.randn(600, 600, generator=generator),
    )


def test_states_kept_for_draws_out_of_order_are_few():
    def build():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(300)))

    torch.manual_seed(2)
    expected = build()
    torch.manual_seed(2)
    model = deferred_init(build)
    recording = recording_of(model)
    wanted = list(expected.parameters())
    made = list(model.parameters())
    for ours, theirs in zip(reversed(made), reversed(wanted), strict=True):
        assert torch.equal(materialize_tensor(ours), theirs)
    drawn = sum(p.numel() for p in wanted)
    (timeline,) = recording.timelines.values()
    assert len(timeline._states) <= drawn / 2**18 + 1

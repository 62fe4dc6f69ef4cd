"""Constructors that seed, rewind and share random generators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.record import RecordError, deferred_init, materialize_tensor


def test_an_explicit_generator_and_the_default_one(assert_eager_equals_deferred):
    def body(self):
        generator = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.randn(3, generator=generator))
        self.b = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.empty(3).normal_(generator=generator))
        generator.manual_seed(5)
        self.d = nn.Parameter(torch.randn(3, generator=generator))

    model = assert_eager_equals_deferred(body)
    assert torch.equal(model.a, model.d)


def test_the_callers_own_generator_ends_where_eager_leaves_it():
    def build(generator):
        return nn.Parameter(torch.randn(5, generator=generator))

    eager, deferred = torch.Generator(), torch.Generator()
    eager.manual_seed(3)
    deferred.manual_seed(3)
    expected = build(eager)
    tensor = deferred_init(build, deferred)
    materialize_tensor(tensor)
    assert torch.equal(tensor, expected)
    assert torch.equal(eager.get_state(), deferred.get_state())


def test_manual_seed_inside_also_the_same_seed_twice(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Linear(3, 3)
        torch.manual_seed(3)
        self.b = nn.Linear(3, 3)
        torch.manual_seed(3)
        self.c = nn.Linear(3, 3)

    model = assert_eager_equals_deferred(body)
    assert torch.equal(model.b.weight, model.c.weight)


def test_a_seed_set_last_is_the_final_state(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Linear(3, 3)
        torch.manual_seed(11)

    assert_eager_equals_deferred(body)


def test_forked_and_restored_generator_states(assert_eager_equals_deferred):
    def body(self):
        self.a = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)
        state = torch.get_rng_state()
        self.d = nn.Linear(2, 2)
        torch.set_rng_state(state)
        self.e = nn.Linear(2, 2)

    model = assert_eager_equals_deferred(body)
    assert torch.equal(model.d.weight, model.e.weight)


def test_rewinding_to_the_very_beginning(assert_eager_equals_deferred):
    def body(self):
        state = torch.get_rng_state()
        self.a = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.b = nn.Linear(3, 3)

    model = assert_eager_equals_deferred(body)
    assert torch.equal(model.a.weight, model.b.weight)


def test_every_random_operation_draws_as_in_eager(assert_eager_equals_deferred):
    def body(self):
        big = nn.Parameter(torch.empty(2000, 30))
        nn.init.normal_(big)
        self.big = big
        self.exponential = nn.Parameter(torch.empty(100).exponential_())
        self.cauchy = nn.Parameter(torch.empty(9).cauchy_())
        self.coin = nn.Parameter(torch.empty(3, 3).bernoulli_(0.3))
        self.register_buffer("order", torch.randperm(5))
        self.register_buffer("ints", torch.randint(0, 9, (3,)))
        self.register_buffer("coins", torch.bernoulli(torch.full((5,), 0.5)))
        self.register_buffer("chosen", torch.multinomial(torch.rand(5), 3))
        self.register_buffer("counts", torch.poisson(torch.rand(5) * 5))
        self.register_buffer("spread", torch.normal(torch.zeros(4), torch.rand(4)))
        self.linear = nn.Linear(3, 2)

    assert_eager_equals_deferred(body)


def test_draws_that_end_up_nowhere_still_advance_the_generator(
    assert_eager_equals_deferred,
):
    def body(self):
        torch.rand(7)
        torch.poisson(torch.rand(5) * 9)
        nn.Linear(5, 5)
        self.linear = nn.Linear(3, 2)

    assert_eager_equals_deferred(body)


def test_rewinding_an_explicit_generator_is_refused_by_name():
    def build():
        generator = torch.Generator()
        state = generator.get_state()
        torch.randn(3, generator=generator)
        generator.set_state(state)
        return torch.randn(3, generator=generator)

    # The state was saved before the recording knew the generator: that is a reseed.
    deferred_init(build)

    def rewound():
        generator = torch.Generator()
        torch.randn(3, generator=generator)
        state = generator.get_state()
        torch.randn(3, generator=generator)
        generator.set_state(state)
        return torch.randn(3, generator=generator)

    with pytest.raises(RecordError, match=r"explicit torch\.Generator"):
        deferred_init(rewound)


def test_a_constructor_that_raises_leaves_the_generators_as_they_were():
    torch.manual_seed(4)
    state = torch.get_rng_state()

    def broken():
        torch.manual_seed(5)
        torch.rand(3)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        deferred_init(broken)
    assert torch.equal(state, torch.get_rng_state())
    assert type(torch.rand(2)) is torch.Tensor


def test_the_seed_is_told_as_in_eager(assert_eager_equals_deferred):
    def body(self):
        own = torch.Generator().manual_seed(5)
        self.a = nn.Linear(3, 3)
        first = torch.rand(3, generator=own)
        seeds = torch.initial_seed(), torch.default_generator.initial_seed()
        self.b = first * sum((*seeds, own.initial_seed()))
        torch.manual_seed(torch.initial_seed() + 7)
        self.c = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2**64 - 3)
            self.d = torch.rand(3)
            assert torch.initial_seed() == 2**64 - 3
        self.e = torch.full((2,), float(torch.initial_seed()))

    assert_eager_equals_deferred(body)


def test_another_seed_is_refused_where_the_constructor_asked_for_the_seed():
    torch.manual_seed(3)
    model = deferred_init(lambda: nn.Linear(2, torch.initial_seed()))
    with pytest.raises(di.PlanError, match="or at the seed, which another seed would"):
        di.materialize(model, "cpu", seed=4)
    assert di.materialize(model, "cpu", seed=3).ok


@pytest.mark.parametrize("way", ["set_state", "clone_state", "default"])
def test_a_state_that_is_copied_to_another_generator_is_refused_by_name(way):
    def build():
        own = torch.Generator().manual_seed(5)
        torch.rand(3, generator=own)
        if way == "default":
            torch.set_rng_state(own.get_state())
            return torch.rand(3)
        other = own.clone_state() if way == "clone_state" else torch.Generator()
        if way == "set_state":
            other.set_state(own.get_state())
        return torch.rand(3, generator=other)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(RecordError, match="has the state of another one"):
        deferred_init(build)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_that_the_model_keeps_is_refused_by_name():
    def build():
        model = nn.Linear(2, 2)
        model.state = torch.get_rng_state()
        return model

    with pytest.raises(di.PlanError, match="`state`: a generator's state that was"):
        di.materialize(deferred_init(build), "cpu")

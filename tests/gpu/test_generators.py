"""What recorded constructors do to CUDA's default generator, and states they save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.trackers import Tracker, assert_alike

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


def plain_tracker() -> Tracker:
    return Tracker("cuda")


def graph_safe() -> Any:
    """Transformer Engine's, whose states are generators that graphs can capture."""
    distributed = pytest.importorskip("transformer_engine.pytorch.distributed")
    tracker = distributed.CudaRNGStatesTracker()
    for name, seed in (("model-parallel-rng", 7), ("experts", 9), ("rest", 2)):
        tracker.add(name, seed)
    return tracker


def seeded() -> nn.Module:
    first = nn.Linear(4, 4)
    torch.cuda.manual_seed(11)
    second = nn.Linear(4, 4)
    torch.manual_seed(12)
    third = nn.Linear(4, 4)
    torch.cuda.manual_seed(11)
    return nn.Sequential(first, second, third, nn.Linear(4, 4))


def rewound() -> nn.Module:
    state = torch.cuda.get_rng_state()
    first = nn.Linear(4, 4)
    torch.cuda.set_rng_state(state)
    second = nn.Linear(4, 4)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(5)
        third = nn.Linear(4, 4)
    with torch.random.fork_rng(devices=[]):
        fourth = nn.Linear(4, 4)
    return nn.Sequential(first, second, third, fourth, nn.Linear(4, 4))


def the_seed_is_told() -> nn.Module:
    nn.Linear(4, 4)
    torch.cuda.manual_seed(11)
    nn.Linear(4, 4)
    return nn.Linear(4, torch.cuda.initial_seed())


def own_generator() -> nn.Module:
    own = torch.Generator("cuda").manual_seed(5)
    weight = nn.Parameter(torch.randn(3, device="cuda", generator=own))
    model = nn.Linear(own.initial_seed(), 4)
    other = torch.randn(3, device="cuda", generator=own)
    model.extra, model.other = weight, nn.Parameter(other)
    return model


def both_devices() -> nn.Module:
    first = nn.Linear(4, 4, device="cpu")
    torch.cuda.manual_seed(3)
    second = nn.Linear(4, 4, device="cuda")
    state = torch.get_rng_state()
    third = nn.Linear(4, 4, device="cpu")
    torch.set_rng_state(state)
    return nn.Sequential(first, second, third, nn.Linear(4, 4, device="cpu")).cuda()


def assert_equal_models(eager: nn.Module, model: nn.Module) -> None:
    pairs = zip(eager.named_parameters(), model.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert one.device == other.device, name
        assert torch.equal(one, other), name


BUILDS = (seeded, rewound, the_seed_is_told, own_generator, both_devices)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("seed", [3, None])
def test_constructors_that_set_cudas_generator(
    build: Callable[[], nn.Module], seed: int | None
) -> None:
    torch.manual_seed(3)
    with torch.device("cuda"):
        eager = build()
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    model = di.deferred_init(build, device="cuda")
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())
    di.materialize(model, "cuda", seed=seed)
    assert_equal_models(eager, model)
    assert torch.equal(after[0], torch.get_rng_state())
    assert torch.equal(after[1], torch.cuda.get_rng_state())


def test_seeds_set_for_the_cpu_reach_cuda_if_the_model_is_made_there() -> None:
    """Recorded for the CPU, as a constructor is without a word, and made on CUDA."""
    torch.manual_seed(3)
    with torch.device("cuda"):
        eager = seeded()
    model = di.deferred_init(seeded)
    di.materialize(model, "cuda", seed=3)
    assert_equal_models(eager, model)


def plain_layers(tracker: Any, te: Any) -> nn.Module:
    blocks: list[nn.Module] = []
    for name in ("model-parallel-rng", "experts", "model-parallel-rng"):
        with tracker.fork(name):
            blocks.append(nn.Linear(16, 16))
        blocks.append(nn.Linear(16, 16))
    return nn.Sequential(*blocks)


def with_te(tracker: Any, te: Any) -> nn.Module:
    tracked: dict[str, Any] = {"get_rng_state_tracker": lambda: tracker}
    blocks: list[nn.Module] = []
    for name in ("model-parallel-rng", "experts", "model-parallel-rng"):
        with tracker.fork(name):
            blocks.append(nn.Linear(16, 16))
        blocks += [
            te.Linear(16, 16, **tracked),
            te.LayerNormLinear(16, 16, **tracked),
            te.Linear(16, 16, rng_tracker_name="experts", **tracked),
            te.Linear(16, 16),
            te.ops.BasicLinear(16, 16, rng_state_tracker_function=lambda: tracker),
        ]
    return nn.Sequential(*blocks)


def te_first(tracker: Any, te: Any) -> nn.Module:
    tracked: dict[str, Any] = {"get_rng_state_tracker": lambda: tracker}
    first = te.Linear(16, 16, **tracked)
    with tracker.fork():
        second = nn.Linear(16, 16)
        third = te.Linear(16, 16)
    return nn.Sequential(first, second, third, te.Linear(16, 16, **tracked))


@pytest.mark.parametrize("build", [plain_layers, with_te, te_first])
@pytest.mark.parametrize("make", [plain_tracker, graph_safe])
def test_a_tracker_ends_where_eager_leaves_it(
    build: Callable[..., nn.Module], make: Callable[[], Any]
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    theirs, own = make(), make()
    torch.manual_seed(3)
    with torch.device("cuda"):
        eager = nn.ModuleList([build(theirs, te), build(theirs, te)])
    after = torch.cuda.get_rng_state()
    models = [di.deferred_init(build, own, te, device="cuda") for _ in range(2)]
    di.materialize(models, "cuda", seed=3)
    assert_alike(eager, nn.ModuleList(models), theirs, own)
    assert torch.equal(after, torch.cuda.get_rng_state())
    with own.fork(), torch.device("cuda"):
        one = torch.rand(3)
    with theirs.fork(), torch.device("cuda"):
        assert torch.equal(one, torch.rand(3))
    assert torch.equal(after, torch.cuda.get_rng_state())

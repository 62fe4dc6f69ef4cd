"""Models and tensors in dataclasses and other objects."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.record import recording_of
from tests.reliability.portrait import assert_equal, portrait


@dataclasses.dataclass
class Pair:
    actor: nn.Module
    critic: nn.Module
    name: str = "pair"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    net: nn.Module
    noise: Tensor


class Keeps(nn.Module):
    """Keeps a tensor and a module of its own in a frozen dataclass without a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        hidden = nn.Linear(2, 2)
        self.kept = Frozen(hidden, torch.randn(2) * self.layer.weight[0, :2].detach())


def _pair() -> Pair:
    return Pair(nn.Linear(3, 3), nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("weakly_held", [False, True])
def test_what_a_frozen_dataclass_with_slots_holds_is_made(weakly_held: bool) -> None:
    torch.manual_seed(3)
    eager, state = Keeps(), torch.get_rng_state()
    torch.manual_seed(3)
    model: Any = di.deferred_init(Keeps)
    # To a weak reference a tensor cannot be swapped: another object takes its place.
    reference = weakref.ref(model.kept.noise) if weakly_held else None
    report = di.materialize(model, "cpu")
    assert report.ok
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(portrait(model), portrait(eager))
    assert torch.equal(model.kept.noise, eager.kept.noise)
    assert torch.equal(model.kept.net.weight, eager.kept.net.weight)
    del reference


def test_what_a_frozen_dataclass_with_slots_holds_on_meta_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Keeps()
    with pytest.raises(di.PlanError, match=r"no initializer: `kept\.noise` \(attr"):
        di.materialize(model, "cpu")


def test_models_in_a_dataclass_are_recorded_and_named_where_it_is_given() -> None:
    torch.manual_seed(3)
    eager = _pair()
    torch.manual_seed(3)
    pair = di.deferred_init(_pair)
    recording = recording_of(pair.actor)
    assert recording is not None
    assert {pair.actor, pair.critic[0]} <= set(recording.places)
    text = (
        r"got Pair \(pass the modules in it, as a list: `\.actor` \(`Linear`\), "
        r"`\.critic` \(`Sequential`\)\)"
    )
    given: Any = pair
    verbs: list[Callable[[], Any]] = [
        lambda: di.materialize(given, "cpu"),
        lambda: di.plan(given, "cpu"),
        lambda: di.audit(given),
        lambda: di.materialize([given], "cpu"),
    ]
    for verb in verbs:
        with pytest.raises(TypeError, match=text):
            verb()
    di.materialize([pair.actor, pair.critic], "cpu")
    assert_equal(portrait(pair.actor), portrait(eager.actor))
    assert_equal(portrait(pair.critic), portrait(eager.critic))


def test_modules_in_a_dict_are_named_up_to_ten() -> None:
    models: Any = {f"m{index}": nn.Linear(1, 1) for index in range(12)}
    with pytest.raises(TypeError, match=r"got dict .*`\['m0'\]`.*\.\.\. and 2 more\)"):
        di.materialize(models, "cpu")


@pytest.mark.parametrize("given", [None, 3, object(), "name"])
def test_what_holds_no_modules_is_named_by_its_class(given: Any) -> None:
    kind = type(given).__name__
    text = rf"expected an nn\.Module or a sequence of them, got {kind}$"
    with pytest.raises(TypeError, match=text):
        di.materialize(given, "cpu")

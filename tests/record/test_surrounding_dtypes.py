"""Devices and dtypes that a constructor names, sets or finds around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.record.problems import RecordError
from tests.reliability.portrait import assert_equal, portrait


class Moved(nn.Module):
    """Constructs its children in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)
        self.last = last
        nn.init.normal_(self.last.weight)
        self.scale = nn.Parameter(torch.randn(2))


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "device": lambda m: m.to(device="cpu"),
    "torch.device": lambda m: m.to(device=torch.device("cpu")),
    "device and dtype": lambda m: m.to(device="cpu", dtype=torch.float64),
    "device and non_blocking": lambda m: m.to(device="cpu", non_blocking=True),
    "positional": lambda m: m.to("cpu"),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_module_that_is_moved_inside_by_keyword_stays_recorded(name: str) -> None:
    torch.manual_seed(0)
    expected = portrait(MOVES[name](Moved()))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = di.deferred_init(lambda: MOVES[name](Moved()))
    assert di.is_deferred(model)
    di.materialize(model, "cpu")
    assert_equal(portrait(model), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_is_moved_to_meta_inside_is_on_meta() -> None:
    model = di.deferred_init(lambda: nn.Linear(2, 2).to(device="meta"))
    assert model.weight.is_meta
    assert not di.is_deferred(model)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class OfIntegers(nn.Module):
    """Floating-point numbers of integers, in dtypes that say nothing of the default."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(7)
        self.register_buffer("scaled", (steps * 0.1).float())
        self.register_buffer("divided", (steps / 3).double())
        self.register_buffer("root", torch.sqrt(steps).float())
        self.register_buffer("chosen", torch.where(steps > 2, 0.1, 0.2).float())
        self.register_buffer("angle", torch.sin(steps * 0.1))


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("later", DTYPES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at_first", DTYPES)
def test_the_default_dtype_of_the_constructor_counts(
    at_first: torch.dtype, inside: bool, later: torch.dtype
) -> None:
    def build() -> Any:
        with default_dtype(at_first):
            return OfIntegers()

    expected = portrait(build())
    if inside:
        model = di.deferred_init(build)
    else:
        with default_dtype(at_first):
            model = di.deferred_init(OfIntegers)
    with default_dtype(later):
        di.materialize(model, "cpu")
        assert torch.get_default_dtype() == later
    assert_equal(portrait(model), expected)


def _convolution() -> Any:
    return nn.functional.conv2d(torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3))


AUTOCAST: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(3, 3)(torch.ones(2, 3)).detach(),
    "matmul": lambda: torch.randn(2, 3) @ torch.randn(3, 2),
    "convolution": _convolution,
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        *(torch.randn(1, 2, 3, 4) for _ in range(3))
    ),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_a_forward_under_autocast_is_refused_with_its_line(name: str) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            module.register_buffer("made", AUTOCAST[name]())
        return module

    assert build().made.dtype == torch.bfloat16
    with pytest.raises(RecordError, match=r"test_surrounding_dtypes\.py:\d+ is comp"):
        di.deferred_init(build)


def _product(module: nn.Linear) -> torch.Tensor:
    return module.weight @ module.weight


LATER: dict[str, Callable[[nn.Linear], torch.Tensor]] = {
    "forward": lambda m: m(torch.ones(2, 3)),
    "product": _product,
    "in a gradient": lambda m: (m.weight.detach() @ m.weight).sum(),
    "attention": lambda m: nn.functional.scaled_dot_product_attention(
        *(m.weight[None, None] for _ in range(3))
    ),
}


@pytest.mark.parametrize("of", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LATER)
def test_a_forward_of_a_recorded_model_under_autocast_is_refused_with_its_line(
    name: str, of: str
) -> None:
    module = di.deferred_init(nn.Linear, 3, 3)
    before = torch.is_autocast_enabled(of)
    torch.set_autocast_enabled(of, True)  # a context would need a GPU for "cuda"
    try:
        with pytest.raises(
            RecordError,
            match=rf"test_surrounding_dtypes\.py:\d+ is comp.* off for {of}\. Mater",
        ):
            LATER[name](module)
    finally:
        torch.set_autocast_enabled(of, before)
    di.materialize(module, "cpu", seed=0)
    torch.manual_seed(0)
    assert_equal(portrait(module), portrait(nn.Linear(3, 3)))


def test_what_autocast_leaves_alone_is_recorded_under_it() -> None:
    torch.manual_seed(0)
    eager = nn.Linear(3, 3)
    torch.manual_seed(0)
    module = di.deferred_init(nn.Linear, 3, 3)
    for each in (eager, module):
        with torch.autocast("cpu", torch.bfloat16):
            nn.init.zeros_(each.bias)
            each.scaled = each.weight.detach() * 2
            with torch.autocast("cpu", enabled=False):
                each.product = _product(each).detach()
    di.materialize(module, "cpu")
    assert_equal(portrait(module), portrait(eager))


def test_autocast_of_another_device_than_that_of_the_tensors_does_not_count() -> None:
    def build() -> torch.Tensor:
        return torch.ones(2, 2, device="cpu")

    made = di.deferred_init(build)  # on the CPU, wherever it is replayed
    torch.set_autocast_enabled("cuda", True)
    try:
        product = made @ made
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.equal(di.materialize_tensor(product), torch.full((2, 2), 2.0))


def test_a_constructor_without_such_a_forward_may_stand_under_autocast() -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = portrait(Moved())
        torch.manual_seed(0)
        model = di.deferred_init(Moved)
    di.materialize(model, "cpu")
    assert_equal(portrait(model), expected)

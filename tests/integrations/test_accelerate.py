"""Real accelerate in one process on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.errors import PlanError

accelerate = pytest.importorskip("accelerate")

from deferred_init.integrations.accelerate_plugin import (  # noqa: E402
    Accelerator,
    DeferredInitPlugin,
    _materialized_by_unit,
    attach,
)
from deferred_init.integrations.optimizer_names import OptimizerNames  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fresh_accelerator_state")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("noise", torch.rand(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.embed(tokens)) + self.noise)
        return logits


def eager(cls: Any = Net) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = cls()
    return model


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    theirs = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def step(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for tokens in loader:
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def parts(model: nn.Module) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(16).reshape(4, 4) % 8, 2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer, loader, scheduler


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 0}, "seed"),
        ({"rng": "by_name", "seed": 0}, "seed, rng='by_name'"),
        ({"verify": "full"}, "verify='full'"),
    ],
)
def test_fsdp1_refuses_what_cannot_be_done_unit_by_unit(
    options: dict[str, Any], named: str
) -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(**options))
    with (
        pytest.raises(PlanError, match=f"leaves no place for {named}; use FSDP2"),
        _materialized_by_unit(accelerator),
    ):
        pass


@pytest.mark.parametrize("way", ["subclass", "attach"])
def test_prepare_makes_the_eager_model_and_the_optimizer_trains_it(way: str) -> None:
    plugin = DeferredInitPlugin(seed=0, verify="full")
    if way == "subclass":
        accelerator = Accelerator(cpu=True, deferred_init=plugin)
    else:
        plain = accelerate.Accelerator(cpu=True)
        accelerator = attach(plain, plugin)
        assert accelerator is plain
        assert isinstance(accelerator, accelerate.Accelerator)
    model = di.deferred_init(Net)
    held = list(model.parameters())
    optimizer, loader, scheduler = parts(model)
    model, optimizer, loader, _ = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    assert_equal(model, eager())
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    assert model.head.weight is model.embed.weight
    assert [report.ok for report in accelerator.deferred_init_reports] == [True]
    step(accelerator, model, optimizer, loader)
    reference = eager()
    step(accelerator, reference, *parts(reference)[:2])
    assert_equal(model, reference)


def test_optimizer_and_model_may_be_prepared_apart_and_in_any_order() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    model = di.deferred_init(Net)
    optimizer, loader, scheduler = parts(model)
    loader = accelerator.prepare(loader)
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    scheduler = accelerator.prepare(scheduler)
    step(accelerator, model, optimizer, loader)
    reference = eager()
    step(accelerator, reference, *parts(reference)[:2])
    assert_equal(model, reference)


def test_prepare_model_materializes_too() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    assert_equal(accelerator.prepare_model(di.deferred_init(Net)), eager())


def test_several_models_are_made_together() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    pair = di.deferred_init(lambda: (Net(), Net()))
    first, second = accelerator.prepare(*pair)
    torch.manual_seed(0)
    assert_equal(first, Net())
    assert_equal(second, Net())


def test_a_real_model_is_left_to_accelerate() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=7))
    state = torch.random.get_rng_state()
    model = accelerator.prepare(nn.Linear(2, 2, device="cpu"))
    assert accelerator.deferred_init_reports == []
    assert not torch.equal(state, torch.random.get_rng_state())  # the layer drew
    assert accelerator.prepare(model) is model


def test_state_is_saved_and_loaded_and_the_model_unwraps(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    model, optimizer, loader = di.deferred_init(Net), None, None
    inner = model
    optimizer, loader, _ = parts(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.save_state(tmp_path / "state")
    step(accelerator, model, optimizer, loader)
    accelerator.load_state(tmp_path / "state")
    assert_equal(model, eager())
    accelerator.save_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert accelerator.unwrap_model(model) is inner


def test_weights_fill_the_model(tmp_path: Path) -> None:
    trained = eager()
    with torch.no_grad():
        trained.inner.weight.add_(1.0)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    plugin = DeferredInitPlugin(seed=0, weights=tmp_path / "weights.pt")
    accelerator = Accelerator(cpu=True, deferred_init=plugin)
    assert_equal(accelerator.prepare(di.deferred_init(Net)), trained)


def test_what_cannot_be_made_is_refused_and_nothing_changes() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    accelerator = Accelerator(cpu=True)
    with pytest.raises(PlanError, match="`weight`"):
        accelerator.prepare(Unknown())
    assert accelerator._models == []


def test_attach_refuses_what_is_no_accelerator() -> None:
    with pytest.raises(TypeError) as caught:
        attach(nn.Linear(2, 2))
    assert str(caught.value) == (
        "expected an accelerate.Accelerator, found Linear; pass the object on which "
        "the script calls `prepare`"
    )


def test_attaching_again_replaces_the_plugin() -> None:
    accelerator = attach(accelerate.Accelerator(cpu=True))
    cls = type(accelerator)
    attach(accelerator, DeferredInitPlugin(seed=0))
    assert type(accelerator) is cls
    assert_equal(accelerator.prepare(di.deferred_init(Net)), eager())


def test_a_te_recipe_keeps_weights_in_high_precision_and_asks_for_conversion() -> None:
    plugin = DeferredInitPlugin(recipe="fp8_current")
    recipe = plugin.resolved_recipe()
    assert recipe is not None
    assert not recipe.quantize_weights
    conversion = plugin.conversion()
    assert conversion is not None
    assert conversion.multiple_of == 16
    mxfp8 = DeferredInitPlugin(recipe="mxfp8").conversion()
    assert mxfp8 is not None
    assert mxfp8.multiple_of == 32
    assert DeferredInitPlugin(recipe="bf16").conversion() is None
    off = DeferredInitPlugin(recipe="fp8_current", convert=False)
    assert off.conversion() is None


def test_optimizers_with_strangers_or_state_are_refused_before_sharding() -> None:
    model = nn.Linear(2, 2)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    stateful = torch.optim.Adagrad(model.parameters())
    with pytest.raises(PlanError) as caught:
        OptimizerNames([model], [stranger, stateful])
    assert caught.value.problems == (
        "SGD holds 1 parameters that the model does not have: build it from "
        "`model.parameters()`",
        "Adagrad has state for `0.weight`, `0.bias`, made before the model was "
        "sharded: build the optimizer without state",
    )


def test_compilation_comes_after_the_model_is_made() -> None:
    accelerator = Accelerator(
        cpu=True, deferred_init=DeferredInitPlugin(seed=0), dynamo_backend="eager"
    )
    inner = di.deferred_init(Net)
    optimizer, loader, _ = parts(inner)
    model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
    assert accelerate.utils.is_compiled_module(model)
    assert_equal(inner, eager())
    step(accelerator, model, optimizer, loader)
    reference = eager()
    step(accelerator, reference, *parts(reference)[:2])
    assert_equal(inner, reference)
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is inner


def test_a_model_that_its_user_compiled_is_made_inside_its_wrapper() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    inner = di.deferred_init(Net)
    compiled: Any = torch.compile(inner, backend="eager")
    optimizer, loader, _ = parts(compiled)
    model, optimizer, loader = accelerator.prepare(compiled, optimizer, loader)
    assert model is compiled
    assert_equal(inner, eager())
    step(accelerator, model, optimizer, loader)


def test_each_of_several_models_keeps_its_own_optimizer() -> None:
    accelerator = Accelerator(cpu=True, deferred_init=DeferredInitPlugin(seed=0))
    first, second = di.deferred_init(lambda: (Net(), Net()))
    one, loader, _ = parts(first)
    other = torch.optim.SGD(second.parameters(), lr=0.5)
    first, second, one, other, loader = accelerator.prepare(
        first, second, one, other, loader
    )
    step(accelerator, first, one, loader)
    torch.manual_seed(0)
    left, right = Net(), Net()
    step(accelerator, left, *parts(left)[:2])
    assert_equal(first, left)
    assert_equal(second, right)  # its optimizer has not stepped
    step(accelerator, second, other, loader)
    step(accelerator, right, torch.optim.SGD(right.parameters(), lr=0.5), loader)
    assert_equal(second, right)

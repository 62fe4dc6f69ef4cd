"""Our conversion beside that of accelerate, which builds its layers on a GPU.

On a machine without one they are built on the CPU; nothing else of either is changed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.integrations.te_conversion import convert_to_te

accelerate = pytest.importorskip("accelerate")

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch as te
except (ImportError, OSError):
    te = None

pytestmark = [
    pytest.mark.hf,
    pytest.mark.te,
    pytest.mark.usefixtures("fresh_accelerator_state"),
    pytest.mark.skipif(te is None, reason="Transformer Engine is not installed"),
    pytest.mark.filterwarnings("ignore::Warning:transformer_engine"),
    pytest.mark.filterwarnings("ignore:params_dtype:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _on_cpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("Linear", "LayerNorm"):
        cls = getattr(te, name)

        def init(self: Any, *args: Any, _cls: Any = cls, **kwargs: Any) -> None:
            _cls.__init__(self, *args, **{"device": "cpu", **kwargs})

        monkeypatch.setattr(te, name, type(name, (cls,), {"__init__": init}))


class Block(nn.Module):
    """What accelerate converts right: no ties, all dimensions multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
        self.head = nn.Linear(16, 32, bias=False)


class Hard(nn.Module):
    """What it does not: a tie, a frozen weight, an odd layer between others, RMS."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.first = nn.Linear(16, 16)
        self.first.weight.requires_grad_(False)
        self.first.bias.note = "kept"  # type: ignore[attr-defined]
        self.odd = nn.Linear(16, 20)
        self.last = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


def eager(cls: type[nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return cls().to(dtype)


def accelerates(model: nn.Module) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import convert_model

    Accelerator(cpu=True)  # it asks for a state
    with torch.no_grad():
        convert_model(model)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    found = model.named_parameters()  # accelerate moves what it converts to the GPU
    return {name: parameter.detach().cpu() for name, parameter in found}


def kinds(model: nn.Module) -> dict[str, str]:
    return {fqn: type(module).__name__ for fqn, module in model.named_modules() if fqn}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("built", ["recorded", "real"])
def test_where_accelerate_converts_ours_has_the_same_classes_and_values(
    built: str, dtype: torch.dtype
) -> None:
    theirs = accelerates(eager(Block, dtype))
    if built == "real":
        ours = eager(Block, dtype)
        convert_to_te(ours)
    else:
        ours = di.deferred_init(lambda: Block().to(dtype))
        convert_to_te(ours)
        assert di.materialize(ours, "cpu", seed=0).ok
    assert kinds(ours) == kinds(theirs)
    assert all(isinstance(m, te.Linear) for m in (ours.mlp[0], ours.mlp[2], ours.head))
    assert isinstance(ours.norm, te.LayerNorm)
    assert ours.norm.eps == theirs.norm.eps == 1e-6
    expected = values(theirs)
    made = values(ours)
    assert list(made) == list(expected)
    for name, value in made.items():
        assert value.dtype is expected[name].dtype is dtype
        assert torch.equal(value, expected[name]), name
    for fqn in ("mlp.0", "mlp.2", "head"):
        one, other = ours.get_submodule(fqn), theirs.get_submodule(fqn)
        assert (one.in_features, one.out_features) == (
            other.in_features,
            other.out_features,
        )
        assert one.use_bias == other.use_bias


def test_where_accelerate_stops_at_an_odd_layer_ours_goes_on() -> None:
    theirs = accelerates(eager(Hard))
    assert isinstance(theirs.first, te.Linear)
    assert type(theirs.last) is type(theirs.head) is nn.Linear  # skipped, in silence
    ours = eager(Hard)
    report = convert_to_te(ours)
    assert [item.fqn for item in report.converted] == ["first", "last", "head"]
    assert [item.fqn for item in report.left] == ["odd"]


def test_where_accelerate_drops_a_tie_a_flag_and_an_attribute_ours_keeps_them() -> None:
    def without_odd() -> Any:
        model = eager(Hard)
        del model.odd
        return model

    theirs = without_odd()
    before = list(theirs.parameters())
    accelerates(theirs)
    # An optimizer that was built before would train none of these any more.
    assert len({*theirs.parameters()} - {*before}) == 5
    assert theirs.head.weight is not theirs.embed.weight
    assert theirs.first.weight.requires_grad
    assert not hasattr(theirs.first.bias, "note")
    ours = without_odd()
    held = list(ours.parameters())
    convert_to_te(ours)
    assert ours.head.weight is ours.embed.weight
    assert not ours.first.weight.requires_grad
    assert ours.first.bias.note == "kept"
    assert [id(p) for p in ours.parameters()] == [id(p) for p in held]


def test_a_model_on_meta_is_converted_where_accelerate_fails() -> None:
    with torch.device("meta"):
        theirs = Block()
    with pytest.raises(NotImplementedError, match="meta"):
        accelerates(theirs)
    ours = di.deferred_init(Block)
    convert_to_te(ours)
    assert di.materialize(ours, "cpu", seed=0).ok
    for name, value in values(ours).items():
        assert torch.equal(value, values(eager(Block))[name]), name


def test_several_models_are_converted_in_one_prepare() -> None:
    from deferred_init.integrations.accelerate_plugin import (
        Accelerator,
        DeferredInitPlugin,
    )

    plugin = DeferredInitPlugin(recipe="fp8_current", seed=0)
    accelerator = Accelerator(cpu=True, deferred_init=plugin)
    pair = di.deferred_init(lambda: (Block(), Hard()))
    first, second = accelerator.prepare(*pair)
    assert isinstance(first.head, te.Linear)
    assert isinstance(second.last, te.Linear)
    torch.manual_seed(0)
    for model, expected in ((first, Block()), (second, Hard())):
        for name, value in values(model).items():
            assert torch.equal(value, values(expected)[name]), name


def test_accelerates_own_way_takes_one_model_with_its_optimizer() -> None:
    own = accelerate.Accelerator(cpu=True)
    first, second = Block(), Hard()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="multiple models"):
        own._prepare_te(first, second, optimizer)
    with pytest.raises(ValueError, match="a model and an optimizer together"):
        own._prepare_te(first)

"""A failure anywhere leaves model, optimizers and generators as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init import workspace as workspace_module
from deferred_init.handlers.plain import PlainAllocator
from deferred_init.rebind import exchange
from tests.reliability.faults import Injected


class Forty(nn.Module):
    """A model of 40 distinct tensors: tied, frozen, viewed, partly real."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, device="meta")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "lin": nn.Linear(4, 4, device="meta"),
                    "norm": nn.BatchNorm1d(4, device="meta"),
                }
            )
            for _ in range(5)
        )
        self.head = nn.Linear(4, 5, device="meta")
        self.head.weight = self.emb.weight
        self.real = nn.Parameter(torch.ones(2))
        base = torch.zeros(8, device="meta")
        self.register_buffer("base", base)
        self.register_buffer("view", base[1:3])
        self.emb.weight.tag = "kept"
        self.emb.weight.register_hook(lambda grad: grad)
        self.layers[0]["lin"].bias.requires_grad_(False)

    def reset_parameters(self) -> None:
        self.base.copy_(torch.rand(8))
        random.random()


def _state(model: nn.Module) -> list[Any]:
    """Everything that must be as before: objects, contents, order, flags."""
    found: list[Any] = []
    for prefix, module in model.named_modules():
        found.append((prefix, id(module), module.training, list(vars(module))))
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    values = None if tensor.is_meta else tuple(tensor.tolist())
                    found.append(
                        (
                            (prefix, name, id(tensor), type(tensor), tensor.device),
                            (tensor.requires_grad, tuple(tensor.__dict__.items())),
                            (tensor.dtype, tensor.shape, tensor.stride(), values),
                            (tensor._is_view(), id(tensor._base)),
                        )
                    )
    return found


def _is_dry_run(argument: Any) -> bool:
    """Whether an init function is being tried on meta while the plan is made."""
    if isinstance(argument, nn.Module):
        argument = next(argument.buffers(), next(argument.parameters(), None))
    return isinstance(argument, torch.Tensor) and argument.device.type == "meta"


def _fail_at(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if function is not exchange and _is_dry_run([*args, *kwargs.values()][0]):
            return function(*args, **kwargs)
        calls += 1
        if calls == count:
            # A view in a local variable keeps its base from being swapped back
            # for as long as the traceback lives.
            values = [*args, *kwargs.values()]
            views = [a.view(-1) for a in values if isinstance(a, torch.Tensor)]
            raise Injected(f"call {count} with {len(views)} tensors")
        return function(*args, **kwargs)

    wrapper.calls = lambda: calls  # type: ignore[attr-defined]
    return wrapper


_POINTS = {
    "allocation": (PlainAllocator, "empty_like"),
    "swap": (workspace_module, "exchange"),
    "init of Linear": (nn.init, "kaiming_uniform_"),
    "init of BatchNorm": (nn.init, "ones_"),
    "init of Embedding": (nn.init, "normal_"),
    "init function": (nn.init, "uniform_"),
    "init of the model": (Forty, "reset_parameters"),
    "cast at the end": (workspace_module.ExecutionWorkspace, "finish"),
}


def _run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    di.materialize(model, "cpu", optimizers=[optimizer], seed=1, dtype=torch.bfloat16)


def _setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Forty()
    distinct = {id(t) for t in [*model.parameters(), *model.buffers()]}
    assert len(distinct) == 40
    return model, torch.optim.AdamW(model.parameters())


def _generators() -> tuple[Any, ...]:
    return (torch.get_rng_state().tolist(), random.getstate())


@pytest.mark.parametrize("point", list(_POINTS))
def test_a_fault_at_every_single_call_changes_nothing(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = _POINTS[point]
    original = getattr(owner, name)
    count = 0
    while True:
        count += 1
        model, optimizer = _setup()
        before, generators = _state(model), _generators()
        groups = [id(p) for p in optimizer.param_groups[0]["params"]]
        faulty = _fail_at(count, original)
        monkeypatch.setattr(owner, name, faulty)
        try:
            with pytest.raises(di.MaterializeError, match="Injected: call"):
                _run(model, optimizer)
            failed = True
        except pytest.fail.Exception:
            failed = False
        finally:
            monkeypatch.setattr(owner, name, original)
        if not failed:
            break
        assert _state(model) == before
        assert _generators() == generators
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == groups
        _run(model, optimizer)
        reference, other = _setup()
        _run(reference, other)
        for key, value in reference.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
    assert count > 1, f"{point} was never reached"
    if point in ("allocation", "swap"):
        assert count > 30


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_is_undone_too(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _setup()
    before, generators = _state(model), _generators()

    def interrupt(self: nn.Module) -> None:
        if not _is_dry_run(self):
            raise error
        self.base.copy_(torch.rand(8))

    monkeypatch.setattr(Forty, "reset_parameters", interrupt)
    expected = di.MaterializeError if issubclass(error, Exception) else error
    with pytest.raises(expected):
        _run(model, optimizer)
    assert _state(model) == before
    assert _generators() == generators


def test_the_error_names_step_module_and_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = _setup()
    monkeypatch.setattr(nn.init, "ones_", _fail_at(2, nn.init.ones_))
    with pytest.raises(di.MaterializeError) as caught:
        _run(model, optimizer)
    text = str(caught.value)
    assert "`layers.1.norm`" in text
    assert ".reset_parameters)" in text
    assert "failed with Injected: call 2" in text
    assert "put back as they were" in text
    assert isinstance(caught.value.__cause__, Injected)


def test_module_attributes_that_a_failed_init_set_are_gone_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = _setup()

    def messy(self: nn.Module) -> None:
        self.base.copy_(torch.rand(8))
        if _is_dry_run(self):
            return
        self.new_attribute = 1
        self.register_buffer("new_buffer", torch.ones(1))
        del self.view
        raise Injected("after a mess")

    monkeypatch.setattr(Forty, "reset_parameters", messy)
    before = _state(model)
    with pytest.raises(di.MaterializeError, match="after a mess"):
        _run(model, optimizer)
    assert _state(model) == before

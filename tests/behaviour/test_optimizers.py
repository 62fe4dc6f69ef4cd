"""Optimizers built while the model has no memory: identity, and equal steps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di

CLOSURE = {"LBFGS"}
# Lists and dicts of the classes that exist, so that a new one is tested at once.
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    "Adagrad": [{"initial_accumulator_value": 0.3}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adam": [{"amsgrad": True}],
    "LBFGS": [{"max_iter": 2}],
}
SPARSE = {"SparseAdam"}


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, sparse=sparse)
        if not sparse:
            self.inner = nn.Linear(4, 4, bias=False)
            self.head = nn.Linear(4, 5)
            self.head.weight = self.emb.weight
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.emb(index)
        return self.head(self.inner(hidden)) if hasattr(self, "head") else hidden


def _variants() -> list[Any]:
    cases = []
    for name, kind in CLASSES.items():
        named = inspect.signature(kind).parameters
        flags = [{}, *({flag: True} for flag in ("foreach", "fused") if flag in named)]
        for flag in flags:
            for options in OPTIONS.get(name, [{}]):
                label = "-".join([name, *flag])
                cases.append(pytest.param(kind, {**options, **flag}, id=label))
    return cases


def _params(kind: type, model: nn.Module) -> Any:
    """One group where the class allows no more or takes matrices only, else two."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind.__name__ == "Muon":
        return [p for p in params if p.dim() == 2]
    if kind.__name__ in CLOSURE | SPARSE:
        return params
    return [
        {"params": params[:1], "lr": 0.05},
        {"params": [*params[1:], model.frozen.weight]},
    ]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([0, 3, 3])).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def _flat_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    return torch.utils._pytree.tree_leaves(optimizer.state_dict())


@pytest.mark.parametrize(("kind", "options"), _variants())
def test_an_optimizer_built_before_makes_the_steps_of_one_built_after(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    sparse = kind.__name__ in SPARSE
    torch.manual_seed(0)
    expected = Net(sparse=sparse)
    reference = kind(_params(kind, expected), **options)
    with torch.device("meta"):
        model = Net(sparse=sparse)
    optimizer = kind(_params(kind, model), **options)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    report = di.materialize(model, "cpu", optimizers=[optimizer], seed=0)
    assert report.ok
    owned = {id(param) for param in model.parameters()}
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        assert all(a is b for a, b in zip(group["params"], before, strict=True))
        assert all(id(param) in owned for param in group["params"])
    for state in optimizer.state.values():
        for value in state.values():
            assert not (isinstance(value, Tensor) and value.is_meta)
    _train(expected, reference)
    _train(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected.get_parameter(name)), name
    for ours, theirs in zip(
        _flat_state(optimizer), _flat_state(reference), strict=True
    ):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adagrads_step_has_the_dtype_that_torch_gives_it(
    fused: bool, dtype: torch.dtype
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.Adagrad(model.parameters(), fused=fused)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        expected, reference = build()
        with torch.device("meta"):
            model, optimizer = build()
        di.materialize(model, "cpu", optimizers=[optimizer])
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        made, wanted = optimizer.state[one], reference.state[other]
        assert {k: v.dtype for k, v in made.items()} == {
            k: v.dtype for k, v in wanted.items()
        }
        assert all(torch.equal(made[key], wanted[key]) for key in wanted)


def test_state_that_adagrad_made_without_memory_is_what_eager_makes() -> None:
    expected = nn.Linear(3, 3)
    reference = torch.optim.Adagrad(expected.parameters(), initial_accumulator_value=2)
    model = nn.Linear(3, 3, device="meta")
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=2)
    report = di.materialize(model, "cpu", optimizers=optimizer)
    pairs = zip(optimizer.state.values(), reference.state.values(), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours["sum"], theirs["sum"])
        assert torch.equal(ours["step"], theirs["step"])
        assert ours["step"].device == theirs["step"].device
    assert any("Adagrad.state" in note for note in report.notes)


def test_a_group_added_before_is_trained_like_the_others() -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW([model.emb.weight])
    optimizer.add_param_group({"params": [model.inner.weight], "lr": 1.0})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    di.materialize(model, "cpu", optimizers=optimizer, seed=0)
    before = model.inner.weight.detach().clone()
    _train(model, optimizer)
    scheduler.step()
    assert not torch.equal(model.inner.weight, before)
    assert optimizer.param_groups[1]["params"][0] is model.inner.weight


def test_a_grad_scaler_made_before_is_independent_of_the_model() -> None:
    with torch.device("meta"):
        model = Net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    di.materialize(model, "cpu", optimizers=optimizer, seed=0)
    scaler.scale(model(torch.tensor([1])).pow(2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.emb.weight.grad is not None

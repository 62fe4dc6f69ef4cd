"""How the audit looks, and what plugs into it."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.audit import EXPLANATIONS, Scene, register_detector, run_audit
from deferred_init.audit import scene as scene_module
from deferred_init.audit.graph import look
from deferred_init.audit.hooks import hook_is_registered
from deferred_init.report import Finding

PACKAGE = Path(di.__file__).parent


def _meta() -> Tensor:
    return torch.empty(2, device="meta")


class Plain:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class WithSlots:
    """An object with slots alone."""

    __slots__ = ("first", "second")

    def __init__(self, first: Tensor) -> None:
        self.first = first


def _closure(tensor: Tensor) -> Any:
    return lambda: tensor


class Bound:
    """A method of it can be held without it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def method(self) -> None:
        """Do nothing."""


PLACES = {
    "an attribute": lambda t: t,
    "a list": lambda t: [1, "a", t],
    "a tuple": lambda t: (t,),
    "a dict": lambda t: {"k": t, 3: None},
    "a dict with odd keys": lambda t: {(1, 2): t},
    "a key": lambda t: {t: 1},
    "a tuple that is a key": lambda t: {"k": 1, (1, t): 2},
    "an object that is a key": lambda t: {Plain(held=t): 1},
    "a key of a read-only mapping": lambda t: MappingProxyType({t: 1}),
    "a read-only mapping": lambda t: MappingProxyType({"k": t}),
    "a set": lambda t: {t},
    "a frozen set": lambda t: frozenset([t]),
    "a deque": lambda t: deque([t]),
    "an object": lambda t: Plain(held=t),
    "an object with slots": WithSlots,
    "nested containers": lambda t: [{"a": ({"b": [Plain(x=[t])]},)}],
    "a closure": _closure,
    "a default argument": lambda t: lambda x=t: x,
    "a keyword default": lambda t: lambda *, x=t: x,
    "a partial": lambda t: functools.partial(max, t),
    "a bound method": lambda t: Bound(t).method,
    "a hidden module": lambda t: [nn.ParameterList([nn.Parameter(t)])],
    "an attribute of a tensor": lambda t: _carrying(t),
    "a list in an attribute of a tensor": lambda t: _carrying([t]),
}


def _carrying(value: Any) -> Tensor:
    tensor = torch.zeros(1)
    tensor.carried = value  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("scope", ["model", "holder", "optimizer"])
def test_a_deferred_tensor_is_found_wherever_it_is_held(where: str, scope: str) -> None:
    model = nn.Linear(2, 2)
    value = PLACES[where](_meta())
    holders, optimizers = (), ()
    if scope == "model":
        model.held = value
        code = "deferred-tensor"
    elif scope == "holder":
        holders, code = (value,), "deferred-in-holder"
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.masters = value
        optimizers, code = (optimizer,), "deferred-in-optimizer"
    found = run_audit((model,), holders=holders, optimizers=optimizers)
    assert [finding.code for finding in found] == [code]
    assert "expected a tensor with memory, found" in found[0].message
    assert "held" in found[0].fqn or scope != "model"


def test_a_deferred_tensor_in_a_hook_is_found() -> None:
    model, tensor = nn.Linear(2, 2), _meta()
    model.register_forward_hook(lambda *args: tensor)
    (finding,) = run_audit((model,))
    assert finding.code == "deferred-tensor"
    assert "_forward_hooks" in finding.fqn
    assert finding.fqn.endswith("<tensor>")


def test_a_deferred_gradient_is_found() -> None:
    model = nn.Linear(2, 2, device="meta")
    model(torch.empty(1, 2, device="meta")).sum().backward()
    places = [f.fqn for f in run_audit((model,)) if f.code == "deferred-tensor"]
    assert places == ["weight", "weight.grad", "bias", "bias.grad"]


def test_a_fake_tensor_is_deferred_too() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(2, 2)
    with FakeTensorMode():
        model.held = torch.empty(2)
    assert [f.code for f in run_audit((model,))] == ["deferred-tensor"]


def test_names_lead_to_the_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].held = {"a": [Plain(x=_meta())]}
    (finding,) = run_audit((model,))
    assert finding.fqn == "0.held['a'][0].x"
    two = run_audit((model, nn.Linear(1, 1)))
    assert two[0].fqn == "model[0].0.held['a'][0].x"


def test_a_module_reachable_twice_is_listed_once_under_its_registered_name() -> None:
    model = nn.Module()
    model.__dict__["alias"] = hidden = nn.Linear(2, 2)
    model.block = nn.Sequential(hidden)
    assert [m.fqn for m in look((model,)).modules] == ["", "block", "block.0"]


def test_overridden_methods_of_containers_never_run() -> None:
    class Odd(dict):
        def items(self) -> Any:
            raise RuntimeError

        __iter__ = items

    model = nn.Linear(2, 2)
    model.held = Odd(a=_meta())
    assert [f.fqn for f in run_audit((model,))] == ["held['a']"]


def test_thousands_of_nested_modules_do_not_exhaust_the_stack() -> None:
    model = inner = nn.Sequential()
    for _ in range(5000):
        inner.append(nn.Sequential())
        inner = inner[0]
    inner.append(nn.Linear(2, 2, device="meta"))
    assert len(run_audit((model,))) == 2


def test_fast_reads_no_values() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    assert run_audit((model,), verify="fast") == []
    assert [f.code for f in run_audit((model,), verify="full")] == ["not-finite"]


@pytest.mark.parametrize("table", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_hooks_that_autograd_does_not_know_are_told_from_those_it_knows(
    table: str,
) -> None:
    ran: list[str] = []
    first, second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    node = first.expand_as(first).grad_fn.next_functions[0][0]
    node.register_hook(lambda *args: ran.append("node"))
    if table == "_backward_hooks":
        first.register_hook(lambda grad: ran.append("hook"))
    else:
        first.register_post_accumulate_grad_hook(lambda param: ran.append("hook"))
    first.grad = kept = torch.full((2, 3), 5.0)
    assert hook_is_registered(first, table)
    assert first.grad is kept
    assert ran == []
    first.grad = None
    torch._C._swap_tensor_impl(first, second)
    assert not hook_is_registered(first, table)
    assert ran == []
    assert len(getattr(first, table)) == 1


def test_hooks_are_probed_under_inference_mode_and_no_grad_too() -> None:
    param = nn.Parameter(torch.ones(2))
    param.register_hook(lambda grad: grad)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            assert hook_is_registered(param, "_backward_hooks")


def test_a_detector_can_be_plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_module, "_detectors", [*scene_module._detectors])

    @register_detector
    def finds_linears(scene: Scene) -> Iterator[Finding]:
        for found in scene.graph.modules:
            if isinstance(found.module, nn.Linear):
                yield Finding(code="linear", fqn=found.fqn, message="found a Linear")

    register_detector(finds_linears)
    report = di.audit(nn.Sequential(nn.Linear(2, 2)))
    assert [(f.code, f.fqn) for f in report.findings] == [("linear", "0")]
    assert "`0` [linear] found a Linear" in str(report)


def test_every_code_is_explained_and_every_explanation_is_of_a_code() -> None:
    text = "\n".join(
        path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.name != "explanations.py"
    )
    for scope in ("optimizer", "holder"):
        text += text.replace("{scope}", scope).replace("{place.scope}", scope)
    named = set(re.findall(r'code(?:=|, \w+ = | = )f?"([a-z-]+)"', text))
    assert named
    assert named <= set(EXPLANATIONS)
    assert all(f'"{code}"' in text for code in EXPLANATIONS)
    assert all(text.endswith(".") for pair in EXPLANATIONS.values() for text in pair)

"""Seeded faults: each is put into a healthy, materialized model, and must be found."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import deferred_init as di
from deferred_init.audit import Snapshot, run_audit, take_snapshot
from deferred_init.poison import fill_poison
from tests.reliability.tally import tally


class Model(nn.Module):
    """Ties, views, frozen and attributed parameters, hooks, an RNN, plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4, padding_idx=0)
        self.rnn = nn.GRU(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.frozen.eval()
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.body = nn.Linear(4, 4)
        self.body.weight.tensor_model_parallel = True
        self.body.weight.owner = "me"
        self.body.weight.register_hook(_double)
        self.body.bias.register_post_accumulate_grad_hook(_nothing)
        self.body.register_forward_hook(_no_output)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("window", self.table[2:6])
        self.extra = {"scales": [torch.ones(3)]}
        self.note = "kept"


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _nothing(param: Tensor) -> None:
    pass


def _no_output(*args: Any) -> None:
    pass


@dataclass
class Situation:
    """A materialized model with all that holds its parameters."""

    model: Model
    optimizer: torch.optim.Optimizer
    holders: list[Any]
    expected: Snapshot
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def codes(self, *, snapshot: bool) -> list[str]:
        findings = run_audit(
            (self.model,),
            optimizers=(self.optimizer,),
            holders=self.holders,
            verify="full",
            expected=self.expected if snapshot else None,
            device=self.device if snapshot else None,
        )
        return [finding.code for finding in findings]


def _situation() -> Situation:
    model = di.deferred_init(Model)
    optimizer = torch.optim.Adam(model.parameters())
    holders: list[Any] = [
        {"params": [p for p in model.parameters() if p.requires_grad]},
        lambda: model.body.weight,
    ]
    expected = take_snapshot((model,), optimizers=(optimizer,), holders=holders)
    di.materialize(
        model, "cpu", optimizers=optimizer, holders=holders, verify="full", seed=0
    )
    return Situation(model, optimizer, holders, expected)


def _fill_state(s: Situation) -> dict[str, Tensor]:
    for param in s.model.parameters():
        if param.requires_grad:
            s.optimizer.state[param] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
    return s.optimizer.state[s.model.body.weight]


Mutation = Callable[[Situation], None]
ALONE: dict[str, tuple[str, Mutation]] = {}
WITH_SNAPSHOT: dict[str, tuple[str, Mutation]] = {}


def mutation(code: str, *, alone: bool) -> Callable[[Mutation], Mutation]:
    """Register a fault, the code it must yield, and whether it shows by itself."""

    def register(fn: Mutation) -> Mutation:
        name = fn.__name__.strip("_").replace("_", " ")
        WITH_SNAPSHOT[name] = (code, fn)
        if alone:
            ALONE[name] = (code, fn)
        return fn

    return register


def _new(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)


@mutation("deferred-tensor", alone=True)
def _a_parameter_is_left_on_meta(s: Situation) -> None:
    s.model.body.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


@mutation("deferred-tensor", alone=True)
def _a_buffer_is_left_on_meta(s: Situation) -> None:
    s.model.norm.running_mean = torch.empty(4, device="meta")


@mutation("deferred-tensor", alone=True)
def _a_tensor_in_a_container_is_left_on_meta(s: Situation) -> None:
    s.model.extra["scales"][0] = torch.empty(3, device="meta")


@mutation("deferred-tensor", alone=True)
def _main_grad_is_left_on_meta(s: Situation) -> None:
    s.model.body.bias.main_grad = torch.empty(4, device="meta")


@mutation("deferred-tensor", alone=True)
def _a_hidden_module_is_left_on_meta(s: Situation) -> None:
    s.model.extra["head"] = nn.Linear(2, 2, device="meta")


@mutation("deferred-tensor", alone=True)
def _a_hook_closes_over_a_meta_tensor(s: Situation) -> None:
    scale = torch.empty(4, device="meta")
    s.model.body.register_forward_hook(lambda m, i, output: output * scale)


@mutation("deferred-in-holder", alone=True)
def _an_averaged_copy_is_left_on_meta(s: Situation) -> None:
    s.holders.append(AveragedModel(nn.Linear(2, 2, device="meta")))


@mutation("deferred-in-optimizer", alone=True)
def _an_optimizer_keeps_a_meta_parameter(s: Situation) -> None:
    params = s.optimizer.param_groups[0]["params"]
    params[-1] = nn.Parameter(torch.empty(params[-1].shape, device="meta"))


@mutation("optimizer-stale", alone=True)
def _an_optimizer_keeps_a_replaced_parameter(s: Situation) -> None:
    s.model.body.weight = _new(s.model.body.weight)


@mutation("optimizer-foreign", alone=True)
def _the_optimizer_belongs_to_another_model(s: Situation) -> None:
    for group in s.optimizer.param_groups:
        group["params"][:] = [_new(p) for p in group["params"]]


@mutation("optimizer-state-deferred", alone=True)
def _optimizer_state_is_left_on_meta(s: Situation) -> None:
    _fill_state(s)["exp_avg"] = torch.empty(4, 4, device="meta")


@mutation("optimizer-state-shape", alone=True)
def _optimizer_state_has_another_shape(s: Situation) -> None:
    _fill_state(s)["exp_avg"] = torch.zeros(4)


@mutation("optimizer-orphan-state", alone=True)
def _optimizer_state_belongs_to_a_stranger(s: Situation) -> None:
    state = _fill_state(s)
    s.optimizer.state[torch.zeros(4, 4)] = state


@mutation("optimizer-stale", alone=False)
def _a_parameter_leaves_its_group(s: Situation) -> None:
    s.optimizer.param_groups[0]["params"].pop()


@mutation("optimizer-order", alone=False)
def _two_parameters_of_a_group_change_places(s: Situation) -> None:
    params = s.optimizer.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]


@mutation("holder-stale", alone=True)
def _a_holder_keeps_a_replaced_parameter(s: Situation) -> None:
    old = s.holders[0]["params"]
    old[-1] = _new(old[-1])


@mutation("broken-tie", alone=False)
def _a_tie_is_broken(s: Situation) -> None:
    s.model.head.weight = _new(s.model.head.weight)


@mutation("duplicate-storage", alone=True)
def _a_tie_is_made_of_two_parameters_over_one_storage(s: Situation) -> None:
    s.model.head.weight = nn.Parameter(s.model.emb.weight.data)


@mutation("broken-tie", alone=True)
def _a_declared_tie_is_broken(s: Situation) -> None:
    s.model.all_tied_weights_keys = {"head.weight": "emb.weight"}
    s.model.head.weight = _new(s.model.head.weight)


@mutation("broken-view", alone=False)
def _a_view_gets_memory_of_its_own(s: Situation) -> None:
    s.model.window = s.model.window.clone()


@mutation("broken-view", alone=False)
def _a_view_shows_another_part(s: Situation) -> None:
    s.model.window = s.model.table[1:5]


@mutation("requires-grad-changed", alone=False)
def _a_frozen_weight_thaws(s: Situation) -> None:
    s.model.frozen.weight.requires_grad_(True)


@mutation("requires-grad-changed", alone=False)
def _a_weight_freezes(s: Situation) -> None:
    s.model.body.weight.requires_grad_(False)


@mutation("lost-attribute", alone=False)
def _an_attribute_is_lost(s: Situation) -> None:
    del s.model.body.weight.tensor_model_parallel


@mutation("lost-attribute", alone=False)
def _an_attribute_has_another_value(s: Situation) -> None:
    s.model.body.weight.owner = "you"


@mutation("lost-hook", alone=False)
def _a_tensor_hook_is_lost(s: Situation) -> None:
    s.model.body.weight._backward_hooks.clear()


@mutation("lost-hook", alone=True)
def _a_tensor_hook_stands_in_the_table_alone(s: Situation) -> None:
    torch._C._swap_tensor_impl(s.model.body.weight, _new(s.model.body.weight))


@mutation("lost-hook", alone=True)
def _a_hook_after_accumulation_stands_in_the_table_alone(s: Situation) -> None:
    torch._C._swap_tensor_impl(s.model.body.bias, _new(s.model.body.bias))


@mutation("lost-module-hook", alone=False)
def _a_forward_hook_is_lost(s: Situation) -> None:
    s.model.body._forward_hooks.clear()


@mutation("lost-module-attribute", alone=False)
def _an_attribute_of_a_module_is_lost(s: Situation) -> None:
    del s.model.note


@mutation("lost-tensor", alone=False)
def _a_buffer_is_lost(s: Situation) -> None:
    del s.model.norm.running_var


@mutation("lost-module", alone=False)
def _a_module_is_lost(s: Situation) -> None:
    del s.model._modules["norm"]


@mutation("replaced-module", alone=False)
def _a_module_is_replaced(s: Situation) -> None:
    s.model.norm = nn.BatchNorm1d(4)


@mutation("replaced-object", alone=False)
def _a_buffer_object_is_replaced(s: Situation) -> None:
    s.model.norm.running_mean = s.model.norm.running_mean.clone()


@mutation("module-class-changed", alone=False)
def _a_module_changes_its_class(s: Situation) -> None:
    s.model.frozen.__class__ = type("Other", (nn.Linear,), {})


@mutation("mode-changed", alone=False)
def _a_module_goes_back_to_training(s: Situation) -> None:
    s.model.frozen.train()


@mutation("persistence-changed", alone=False)
def _a_buffer_becomes_persistent(s: Situation) -> None:
    s.model._non_persistent_buffers_set.clear()


@mutation("geometry-changed", alone=False)
def _strides_change(s: Situation) -> None:
    s.model.body.weight.data = s.model.body.weight.data.t().contiguous().t()


@mutation("geometry-changed", alone=False)
def _a_shape_changes(s: Situation) -> None:
    s.model.norm.running_mean.data = torch.zeros(5)


@mutation("wrong-dtype", alone=False)
def _a_parameter_is_cast(s: Situation) -> None:
    s.model.body.weight.data = s.model.body.weight.data.to(torch.bfloat16)


@mutation("integer-buffer-cast", alone=True)
def _a_counter_is_cast_to_floating_point(s: Situation) -> None:
    s.model.norm.num_batches_tracked = s.model.norm.num_batches_tracked.float()


@mutation("wrong-device", alone=False)
def _everything_is_on_another_device_than_asked_for(s: Situation) -> None:
    s.device = torch.device("cuda:0")


@mutation("not-a-parameter", alone=True)
def _a_plain_tensor_is_registered_as_a_parameter(s: Situation) -> None:
    s.model.body._parameters["bias"] = torch.zeros(4)


@mutation("rnn-flat-weights", alone=True)
def _an_rnn_computes_with_old_weights(s: Situation) -> None:
    table = s.model.rnn._parameters
    table["weight_hh_l0"] = _new(table["weight_hh_l0"])


@mutation("parametrization-broken", alone=True)
def _a_parametrized_weight_is_registered_a_second_time(s: Situation) -> None:
    s.model.normed._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))


@mutation("padding-row", alone=True)
def _a_padding_row_is_not_zero(s: Situation) -> None:
    del s.model.head  # with a tied head the row would be trained
    with torch.no_grad():
        s.model.emb.weight[0] = 1.0


@mutation("poison-left", alone=True)
def _half_a_tensor_was_never_written(s: Situation) -> None:
    fill_poison(s.model.frozen.weight[2:])


@mutation("poison-left", alone=True)
def _a_counter_was_never_written(s: Situation) -> None:
    fill_poison(s.model.norm.num_batches_tracked)


@mutation("not-finite", alone=True)
def _one_value_is_nan(s: Situation) -> None:
    s.model.frozen.weight[1, 2] = torch.nan


@mutation("not-finite", alone=True)
def _one_value_is_infinite(s: Situation) -> None:
    s.model.norm.running_var[1] = -torch.inf


@mutation("not-finite", alone=True)
def _a_buffer_holds_nan(s: Situation) -> None:
    s.model.table[7] = torch.nan


def test_the_situation_itself_is_healthy() -> None:
    situation = _situation()
    assert situation.codes(snapshot=True) == []
    assert situation.codes(snapshot=False) == []


@pytest.mark.parametrize("name", ALONE)
def test_the_audit_alone_finds_that(name: str) -> None:
    code, mutate = ALONE[name]
    situation = _situation()
    mutate(situation)
    assert code in situation.codes(snapshot=False)
    tally["seeded mutations"] += 1


@pytest.mark.parametrize("name", WITH_SNAPSHOT)
def test_the_audit_with_a_snapshot_finds_that(name: str) -> None:
    code, mutate = WITH_SNAPSHOT[name]
    situation = _situation()
    mutate(situation)
    assert code in situation.codes(snapshot=True)
    tally["seeded mutations"] += 1


def test_a_real_tensor_that_was_written_or_moved_is_found() -> None:
    for change in (
        lambda w: w.detach().zero_(),
        lambda w: setattr(w, "data", torch.zeros(2, 2)),
    ):
        model = nn.Linear(2, 2)
        expected = take_snapshot((model,))
        change(model.weight)
        found = run_audit((model,), expected=expected)
        assert [finding.code for finding in found] == ["touched-real-tensor"]


def test_a_dtype_that_was_asked_for_and_not_given_is_found() -> None:
    model = nn.Linear(2, 2, device="meta")
    expected = take_snapshot((model,))
    di.materialize(model, "cpu")
    found = run_audit(
        (model,), expected=expected, dtypes=[torch.bfloat16], dtype_forced=True
    )
    assert [finding.code for finding in found] == ["wrong-dtype"] * 2


def test_a_holder_that_lost_the_model_is_found() -> None:
    model = nn.Linear(2, 2)
    held = collections.OrderedDict(model.named_parameters())
    expected = take_snapshot((model,), holders=[held])
    held["weight"] = _new(model.weight)
    found = run_audit((model,), holders=[held], expected=expected)
    assert [(f.code, f.fqn) for f in found] == [
        ("holder-stale", "holders[0]['weight']")
    ]


class Elsewhere(nn.Parameter):
    """A parameter that is on another device than the rest, as far as one can ask."""

    device = torch.device("cuda:0")


def test_parameters_of_one_module_on_two_devices_are_found() -> None:
    model = nn.Linear(2, 2)
    model.bias = Elsewhere(torch.zeros(2))
    found = run_audit((model,))
    assert [(f.code, f.fqn) for f in found] == [("mixed-devices", "bias")]


def test_state_and_gradients_on_another_device_are_found() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.zeros(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    model.weight = weight = Elsewhere(model.weight.detach())
    weight.grad = torch.zeros(2, 2)
    optimizer.param_groups[0]["params"][0] = weight
    optimizer.state[weight] = optimizer.state.pop(next(iter(optimizer.state)))
    found = run_audit((model,), optimizers=(optimizer,))
    assert [finding.code for finding in found] == [
        "optimizer-state-device",
        "optimizer-state-device",
        "gradient-device",
    ]


def test_messages_say_expected_found_and_what_to_do() -> None:
    situation = _situation()
    situation.model.head.weight = nn.Parameter(situation.model.emb.weight.data)
    report = di.audit(situation.model)
    assert not report.ok
    assert str(report.findings[0]) == (
        "`head.weight` [duplicate-storage] expected memory of its own, or the very "
        "Parameter object `emb.weight`, found another Parameter over the same memory: "
        "gradients are split and both are updated; assign one to the other"
    )


def test_at_least_25_faults_are_seeded() -> None:
    assert len(WITH_SNAPSHOT) >= 25
    assert len(ALONE) >= 20

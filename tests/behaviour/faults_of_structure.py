"""Faults in what there is and who holds it: meta, optimizers, ties, modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.behaviour.audit_situation import Faults, Situation, new_parameter

FAULTS = Faults()
mutation = FAULTS.add


def _fill_state(s: Situation) -> dict[str, Tensor]:
    for param in s.model.parameters():
        if param.requires_grad:
            s.optimizer.state[param] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
    return s.optimizer.state[s.model.body.weight]


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
    s.model.body.weight = new_parameter(s.model.body.weight)


@mutation("optimizer-foreign", alone=True)
def _the_optimizer_belongs_to_another_model(s: Situation) -> None:
    for group in s.optimizer.param_groups:
        group["params"][:] = [new_parameter(p) for p in group["params"]]


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
    old[-1] = new_parameter(old[-1])


@mutation("broken-tie", alone=False)
def _a_tie_is_broken(s: Situation) -> None:
    s.model.head.weight = new_parameter(s.model.head.weight)


@mutation("duplicate-storage", alone=True)
def _a_tie_is_made_of_two_parameters_over_one_storage(s: Situation) -> None:
    s.model.head.weight = nn.Parameter(s.model.emb.weight.data)


@mutation("broken-tie", alone=True)
def _a_declared_tie_is_broken(s: Situation) -> None:
    s.model.all_tied_weights_keys = {"head.weight": "emb.weight"}
    s.model.head.weight = new_parameter(s.model.head.weight)


@mutation("broken-view", alone=False)
def _a_view_gets_memory_of_its_own(s: Situation) -> None:
    s.model.window = s.model.window.clone()


@mutation("broken-view", alone=False)
def _a_view_shows_another_part(s: Situation) -> None:
    s.model.window = s.model.table[1:5]


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


@mutation("not-a-parameter", alone=True)
def _a_plain_tensor_is_registered_as_a_parameter(s: Situation) -> None:
    s.model.body._parameters["bias"] = torch.zeros(4)


@mutation("rnn-flat-weights", alone=True)
def _an_rnn_computes_with_old_weights(s: Situation) -> None:
    table = s.model.rnn._parameters
    table["weight_hh_l0"] = new_parameter(table["weight_hh_l0"])


@mutation("parametrization-broken", alone=True)
def _a_parametrized_weight_is_registered_a_second_time(s: Situation) -> None:
    s.model.normed._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))

"""Faults in what a tensor or a module carries: flags, hooks, geometry, values."""

from __future__ import annotations

import torch

from deferred_init.poison import fill_poison
from tests.behaviour.audit_situation import Faults, Situation, new_parameter

FAULTS = Faults()
mutation = FAULTS.add


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
    torch._C._swap_tensor_impl(s.model.body.weight, new_parameter(s.model.body.weight))


@mutation("lost-hook", alone=True)
def _a_hook_after_accumulation_stands_in_the_table_alone(s: Situation) -> None:
    torch._C._swap_tensor_impl(s.model.body.bias, new_parameter(s.model.body.bias))


@mutation("lost-module-hook", alone=False)
def _a_forward_hook_is_lost(s: Situation) -> None:
    s.model.body._forward_hooks.clear()


@mutation("lost-module-attribute", alone=False)
def _an_attribute_of_a_module_is_lost(s: Situation) -> None:
    del s.model.note


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

"""torchdistx's functions, with its meaning and without its gaps."""

from __future__ import annotations

import resource
import threading
import weakref

import pytest
import torch
from torch import nn

from deferred_init.errors import PlanError
from deferred_init.record import (
    RecordError,
    ReplayError,
    defer,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
    recording_of,
)


def build():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def test_is_deferred_knows_tensors_and_modules_and_nothing_else():
    model = deferred_init(build)
    assert is_deferred(model)
    assert is_deferred(model[0].weight)
    assert not is_deferred(torch.zeros(1))
    assert not is_deferred(nn.Linear(1, 1))
    assert not is_deferred(torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="takes a tensor or a module, got `int`"):
        is_deferred(3)


def test_materialize_tensor_gives_the_same_object_back():
    model = deferred_init(build)
    weight = model[0].weight
    other_reference = [weight]
    assert materialize_tensor(weight) is weight
    assert other_reference[0] is model[2].weight
    assert not is_deferred(weight)
    assert type(weight) is nn.Parameter
    assert materialize_tensor(weight) is weight


def test_materialize_tensor_leaves_a_real_tensor_alone():
    tensor = torch.rand(3)
    pointer = tensor.data_ptr()
    assert materialize_tensor(tensor) is tensor
    assert tensor.data_ptr() == pointer


def test_a_single_tensor_as_the_result():
    torch.manual_seed(0)
    expected = torch.randn(3)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    tensor = deferred_init(torch.randn, 3)
    assert torch.equal(materialize_tensor(tensor), expected)
    assert torch.equal(state, torch.get_rng_state())


def test_buffers_only_leaves_parameters_deferred():
    model = deferred_init(build)
    materialize_module(model, buffers_only=True)
    assert not any(is_deferred(b) for b in model.buffers())
    assert all(is_deferred(p) for p in model.parameters())


def test_check_fn_chooses_submodules():
    model = deferred_init(build)
    materialize_module(model, check_fn=lambda m: isinstance(m, nn.BatchNorm1d))
    assert not is_deferred(model[1])
    assert is_deferred(model[0])


def test_real_tensors_of_a_mixed_module_are_not_touched():
    model = deferred_init(build)
    model[1] = nn.BatchNorm1d(3)
    pointer = model[1].weight.data_ptr()
    materialize_module(model)
    assert model[1].weight.data_ptr() == pointer
    assert not is_deferred(model)


def test_a_generator_used_since_the_recording_is_left_alone():
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    model = deferred_init(build)
    torch.manual_seed(77)
    torch.rand(3)
    state = torch.get_rng_state()
    materialize_module(model)
    assert torch.equal(model[0].weight, expected[0].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_weak_references_stay_right():
    model = deferred_init(build)
    reference = weakref.ref(model[0].weight)
    materialize_module(model)
    assert reference() is model[0].weight


def test_nested_deferred_init_records_in_the_outer_one():
    def outer():
        return nn.ModuleList([nn.Linear(2, 2), deferred_init(nn.Linear, 3, 3)])

    model = deferred_init(outer)
    assert recording_of(model[0]) is recording_of(model[1])


def test_recording_allocates_no_parameter_storage():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = deferred_init(lambda: nn.Linear(1 << 20, 1 << 20, bias=False))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert model.weight.numel() * 4 == 1 << 42
    assert after - before < 50_000  # KB, for 4 TB of weights


def test_meta_as_the_device_to_construct_for_is_refused():
    with pytest.raises(ValueError, match="device='meta' is no device to construct for"):
        deferred_init(build, device="meta")


def test_the_ambient_default_device_is_what_the_constructor_sees():
    seen = []
    with torch.device("cuda", 1):
        deferred_init(lambda: seen.append(torch.empty(2).device))
    with torch.device("meta"):
        deferred_init(lambda: seen.append(torch.empty(2).device))
    assert seen == [torch.device("cuda", 1), torch.device("cpu")]


def test_a_cuda_constructor_is_recorded_without_a_gpu():
    def body():
        linear = nn.Linear(3, 3)
        assert linear.weight.is_cuda
        assert linear.weight.get_device() == 0
        table = torch.arange(4, device="cuda").float().cuda(0)
        linear.register_buffer("table", table.to(linear.weight.device) * 2)
        linear.rates = torch.linspace(0, 1, 3).tolist()
        linear.register_buffer("host", torch.ones(2, device="cpu"))
        assert linear.host.is_cpu
        return linear

    model = deferred_init(body, device="cuda")
    assert model.rates == [0.0, 0.5, 1.0]
    materialize_module(model, device="cpu")
    assert torch.equal(model.table, torch.arange(4) * 2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_random_value_of_an_absent_device_is_refused_with_the_line():
    def body():
        return torch.rand(3).sum().item()

    with pytest.raises(
        RecordError, match=r"random value at .*test_materialize\.py:\d+"
    ):
        deferred_init(body, device="cuda")


def test_an_error_of_the_constructor_is_eagers_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        deferred_init(lambda: torch.rand(2, 3) @ torch.rand(2, 3))


def test_a_failing_replay_names_the_operation_and_changes_nothing():
    source = torch.ones(1 << 19)
    model = deferred_init(lambda: nn.Linear(3, 3))
    with torch.no_grad():
        model.register_buffer("total", model.weight.sum() + source)
    source.add_(1)
    state = torch.get_rng_state()
    with pytest.raises(ReplayError, match=r"changed in place"):
        materialize_module(model)
    assert all(is_deferred(p) for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_saving_a_deferred_tensor_is_refused(tmp_path):
    model = deferred_init(build)
    with pytest.raises(TypeError, match="materialize the model before saving"):
        torch.save(model.state_dict(), tmp_path / "model.pt")


def test_safetensors_writes_no_file_of_deferred_tensors(tmp_path):
    error = pytest.importorskip("safetensors").SafetensorError
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    model = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(error):
        save_file(model.state_dict(), path)
    assert not path.exists()
    materialize_module(model)
    save_file(model.state_dict(), path)
    assert torch.equal(load_file(path)["bias"], model.bias)


def test_a_materialized_model_can_be_deferred_and_made_again():
    torch.manual_seed(0)
    model = deferred_init(build)
    recording = recording_of(model)
    materialize_module(model)
    model[0].weight.tag = "kept"
    model[1].weight.requires_grad_(False)
    weight, before = model[0].weight, model[0].weight.detach().clone()
    defer(model, recording)
    assert is_deferred(weight)
    assert model[2].weight is weight
    materialize_module(model)
    assert torch.equal(weight, before)
    assert weight.tag == "kept"
    assert not model[1].weight.requires_grad


def test_deferring_what_the_recording_did_not_make_is_refused_by_name():
    model = deferred_init(build)
    recording = recording_of(model)
    materialize_module(model)
    model.append(nn.Linear(2, 2))
    model[0].bias.data = torch.zeros(7)
    with pytest.raises(PlanError, match=r"3 tensors cannot be deferred") as caught:
        defer(model, recording)
    assert caught.value.problems == ("0.bias", "3.weight", "3.bias")
    assert not is_deferred(model)


def test_deferring_for_weights_leaves_plain_meta_parameters_with_ties():
    model = build()
    model[1].register_buffer("table", torch.arange(3.0), persistent=False)
    weight = model[0].weight
    weight.tag = "kept"
    defer(model, "weights")
    assert weight.is_meta
    assert type(weight) is nn.Parameter
    assert model[2].weight is weight
    assert weight.tag == "kept"
    assert torch.equal(model[1].table, torch.arange(3.0))


def test_a_recording_does_not_keep_its_model_alive():
    model = deferred_init(build)
    recording = recording_of(model)
    recording.mark(model[0])
    materialize_module(model)
    alive = weakref.ref(model), weakref.ref(model[0].weight)
    del model
    assert [reference() for reference in alive] == [None, None]
    assert recording.marks[0].payload is None


def test_torch_is_as_it_was_after_a_recording():
    def replaced():
        return (
            vars(nn.Parameter)["__new__"],
            vars(nn.UninitializedParameter)["__new__"],
            nn.init._no_grad_trunc_normal_,
            torch._utils._rebuild_tensor,
            threading.Thread.start,
        )

    before, inside = replaced(), []
    deferred_init(lambda: inside.append(replaced()))
    assert all(a is not b for a, b in zip(before, inside[0], strict=True))
    assert all(a is b for a, b in zip(before, replaced(), strict=True))


def test_two_threads_that_record_at_once_are_told_so():
    inside, leave = threading.Event(), threading.Event()

    def slow():
        inside.set()
        leave.wait(10)
        return nn.Linear(2, 2)

    thread = threading.Thread(target=deferred_init, args=(slow,))
    thread.start()
    inside.wait(10)
    try:
        with pytest.raises(RecordError, match="another thread is inside deferred_init"):
            deferred_init(nn.Linear, 2, 2)
    finally:
        leave.set()
        thread.join()
    assert is_deferred(deferred_init(nn.Linear, 2, 2))

"""What surrounds a materialization changes nothing: modes, defaults, threads, time."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.one_at_a_time import generators_alone
from tests.reliability.portrait import assert_equal, portrait

ROOT = Path(__file__).resolve().parents[2]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.Embedding(4, 4, padding_idx=0),
        nn.BatchNorm1d(4),
        nn.MultiheadAttention(4, 2),
        nn.GRU(2, 2),
    )


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return build()


def recorded() -> nn.Module:
    return di.deferred_init(build)


@contextmanager
def _set(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def _threads() -> AbstractContextManager[None]:
    return _set(torch.set_num_threads, 1, torch.get_num_threads())


def _deterministic() -> AbstractContextManager[None]:
    return _set(torch.use_deterministic_algorithms, True, False)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": _deterministic,
    "default dtype bfloat16": lambda: _set(
        torch.set_default_dtype, torch.bfloat16, torch.float32
    ),
    "default dtype float64": lambda: _set(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "default device cpu": lambda: _set(torch.set_default_device, "cpu", None),
    "default device meta": lambda: _set(torch.set_default_device, "meta", None),
    "device context meta": lambda: torch.device("meta"),
    "one thread": _threads,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_what_surrounds_the_call_changes_nothing(
    make: Callable[[], nn.Module], name: str
) -> None:
    torch.manual_seed(0)
    expected = portrait(build())
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = make()
    with SURROUNDINGS[name]():
        di.materialize(model, "cpu", verify="full")
        assert di.audit(model, verify="full").ok
    assert_equal(portrait(model), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", [n for n in SURROUNDINGS if "meta" not in n])
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_a_whole_job_in_other_surroundings_equals_eager_there(
    make: Callable[[], nn.Module], name: str
) -> None:
    with SURROUNDINGS[name]():
        torch.manual_seed(0)
        model = build()
        expected, state = portrait(model), torch.get_rng_state()
        torch.manual_seed(0)
        model = make()
        di.materialize(model, "cpu", verify="full")
        if name != "inference_mode":  # see the test below
            assert_equal(portrait(model), expected)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", [on_meta, recorded])
def test_a_model_made_under_inference_mode_can_be_trained(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    with torch.inference_mode():
        di.materialize(model, "cpu")
    assert not any(tensor.is_inference() for tensor in model.parameters())
    model[0](torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("make", [on_meta, recorded])
def test_two_threads_wait_for_each_other_and_both_equal_eager(
    make: Callable[[], nn.Module],
) -> None:
    expected = {}
    for seed in range(4):
        torch.manual_seed(seed)
        expected[seed] = portrait(build())
    models = {seed: make() for seed in range(4)}
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            barrier.wait()
            di.materialize(models[seed], "cpu", seed=seed, verify="full")
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for seed in range(4):
        assert_equal(portrait(models[seed]), expected[seed])


def test_a_thread_that_waits_too_long_is_refused_by_name() -> None:
    started, finish = threading.Event(), threading.Event()

    def hold() -> None:
        with generators_alone("holder"):
            started.set()
            finish.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        started.wait(60)
        with (
            pytest.raises(
                di.MaterializeError, match=r"`plan` waited 0\.05 s"
            ) as caught,
            generators_alone("plan", wait_s=0.05),
        ):
            pass
        assert "one at a time" in str(caught.value)
        assert "Nothing was done" in str(caught.value)
    finally:
        finish.set()
        thread.join(60)


_PRINT_BITS = """
import sys, json, torch, deferred_init as di
from tests.reliability.portrait import Portrait
from tests.reliability.test_surroundings import on_meta, recorded
found = {}
for make in (on_meta, recorded):
    model = make()
    torch.manual_seed(0)
    report = di.materialize(model, "cpu", seed=0)
    facts = Portrait(model).tensors
    found[make.__name__] = [
        [name, tensor.view(-1).double().sum().item()] for name, tensor in facts.items()
    ] + [step.fqn for step in report.steps]
print(json.dumps(found))
"""


def test_the_seed_of_hashes_changes_nothing() -> None:
    outputs = []
    for hash_seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_BITS],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            cwd=ROOT,
            env=environment,
        )
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]["recorded"]) > 20


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_1000_materializations_leave_nothing_behind(
    make: Callable[[], nn.Module],
) -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def once() -> None:
        if make is recorded:
            model = di.deferred_init(small)
        else:
            with torch.device("meta"):
                model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        di.materialize(model, "cpu", optimizers=optimizer, seed=0)

    for _ in range(20):
        once()
    gc.collect()
    objects, resident = len(gc.get_objects()), _resident_bytes()
    for _ in range(980):
        once()
    gc.collect()
    grown_objects = len(gc.get_objects()) - objects
    grown_bytes = _resident_bytes() - resident
    assert grown_objects < 980, f"{grown_objects} objects more"
    assert grown_bytes < 16e6, f"{grown_bytes:,} bytes more"

"""Captures, streams, modes and threads on a GPU: eager values, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plain_models import build, on_meta, recorded
from torch import nn

import deferred_init as di

pytestmark = pytest.mark.gpu


def test_a_capture_of_a_graph_is_refused_by_name_and_goes_on() -> None:
    model = on_meta()
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        for verb in (di.materialize, di.plan):
            with pytest.raises(di.PlanError, match="CUDA graph is being captured"):
                verb(model, "cuda")
        z = y + 1
    graph.replay()
    assert z.tolist() == [3.0] * 4
    assert di.materialize(model, "cuda").ok


@pytest.mark.parametrize("make", [on_meta, recorded])
def test_another_stream_gets_eager_values(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    with torch.device("cuda"):
        expected = build().state_dict()
    model = make()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what comes next has to wait for it
        di.materialize(model, "cuda", seed=3)
    torch.cuda.current_stream().wait_stream(stream)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
    "default device": lambda: torch.device("cuda"),
    "deterministic": lambda: _deterministic(),
}


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("make", [on_meta, recorded])
def test_what_surrounds_the_call_changes_nothing(
    make: Callable[[], nn.Module], name: str
) -> None:
    torch.manual_seed(3)
    with torch.device("cuda"):
        expected = build().state_dict()
    after = torch.cuda.get_rng_state()
    model = make()
    with SURROUNDINGS[name]():
        di.materialize(model, "cuda", seed=3, verify="full")
    assert torch.equal(torch.cuda.get_rng_state(), after)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
        assert not tensor.is_inference()


def test_two_threads_make_two_models() -> None:
    expected = []
    for number in range(2):
        torch.manual_seed(number)
        with torch.device("cuda"):
            expected.append(build().state_dict())
    models = [on_meta(), recorded()]
    threads = [
        threading.Thread(target=di.materialize, args=(m, "cuda"), kwargs={"seed": n})
        for n, m in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for model, values in zip(models, expected, strict=True):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, values[name]), name

"""Memory after a fault: none is kept by whoever keeps the error; a real lack of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from tests.reliability.faults import (
    EVERY,
    Job,
    check_every_boundary,
    quick_collections,
)
from tests.reliability.portrait import seed


def live_bytes() -> int:
    """Return the memory of all tensors that are alive, of those made in the test."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("made", ["meta", "recorded"])
@pytest.mark.parametrize("weights", [False, True])
def test_whoever_keeps_the_error_keeps_no_memory(made: str, weights: bool) -> None:
    """Tensors of 1 MB and more, one of which would be seen."""

    def large() -> nn.Module:
        layers = [nn.Linear(512, 512) for _ in range(2)]
        return nn.Sequential(*layers, nn.utils.parametrizations.weight_norm(layers[0]))

    def job() -> Job:
        seed(3)
        if made == "recorded":
            model = di.deferred_init(large)
        else:
            with torch.device("meta"):
                model = large()
        options: dict[str, Any] = {}
        if weights:
            stored = {"1.weight": torch.ones(512, 512)}
            options = {"weights": stored, "missing": "any"}
        return Job(
            run=lambda: di.materialize(model, "cpu", **options),
            held=lambda: model,
            memory=live_bytes,
            look=lambda held: {
                name: (type(tensor), tensor.is_meta, tensor.shape)
                for name, tensor in held.named_parameters()
            },
            tensors=lambda held: held.parameters(),
        )

    with quick_collections():
        check_every_boundary(job, every=3 * EVERY)


_SCARCE = """
import resource, sys, torch
from torch import nn
import deferred_init as di
from tests.reliability.portrait import assert_equal, generators, portrait

torch.set_num_threads(1)
build = lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(60)))
if sys.argv[1] == "meta":
    with torch.device("meta"):
        model = build()
else:
    model = di.deferred_init(build)
before, states = portrait(model), generators()
pages = int(open("/proc/self/statm").read().split()[0])
scarce = pages * resource.getpagesize() + (100 << 20)
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (scarce, unlimited[1]))
try:
    di.materialize(model, "cpu")
    raise SystemExit("240 MB fitted into 100 MB")
except di.MaterializeError as error:
    assert "put back as they were" in str(error), error
    assert "allocate memory" in str(error), error
finally:
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
assert_equal(portrait(model), before)
assert generators() == states
assert di.materialize(model, "cpu", seed=1).ok
torch.manual_seed(1)
for name, tensor in build().state_dict().items():
    assert torch.equal(tensor, model.state_dict()[name]), name
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("made", ["meta", "recorded"])
def test_a_real_lack_of_memory_on_the_host_is_undone(
    made: str, run_script: Callable[..., str]
) -> None:
    assert run_script("-c", _SCARCE, made) == "done\n"

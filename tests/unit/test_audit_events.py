"""`materialize` raises few audit events: they are slow once somebody listens."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import torch
from torch import nn
import deferred_init as di

NUM_LAYERS = 200

def build():
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(NUM_LAYERS)))

def make():
    if {recorded}:
        return di.deferred_init(build)
    with torch.device("meta"):
        return build()

di.materialize(make(), "cpu")  # what the first call of a process imports and tries
model = make()
events, counting = 0, True

def listen(event, args):
    global events
    events += counting

sys.addaudithook(listen)
di.materialize(model, "cpu")
counting = False
print(events / (2 * NUM_LAYERS))
"""


@pytest.mark.parametrize("recorded", [False, True])
def test_few_events_for_each_tensor(recorded: bool) -> None:
    program = _PROGRAM.format(recorded=recorded)  # a hook stays for good
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 5 < float(done.stdout) < 32

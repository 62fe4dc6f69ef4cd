"""Peak memory on the host: the final size, the largest tensor, and a constant."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, gc, sys, warnings
warnings.simplefilter("ignore")
PR_SET_THP_DISABLE = 41  # huge pages count what nobody touched
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
import torch, transformers
import deferred_init as di

torch.set_num_threads(1)
config = transformers.LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
    num_attention_heads=16, vocab_size=16000,
)
build = transformers.LlamaForCausalLM
small = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, vocab_size=100,
)
def make(config):
    if sys.argv[1] == "recorded":
        return di.deferred_init(build, config)
    with torch.device("meta"):
        return build(config)

di.materialize(make(small), "cpu", seed=0, dtype=torch.bfloat16)  # imports, pools
model = make(config)
largest = max(p.numel() * 4 for p in model.parameters())
gc.collect()
with open("/proc/self/clear_refs", "w") as peak:  # begin to measure from here
    peak.write("5")
def peak_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
before = peak_bytes()
report = di.materialize(model, "cpu", seed=0, dtype=torch.bfloat16, progress=False)
print(peak_bytes() - before, report.final_bytes, largest)
"""


@pytest.mark.hf
@pytest.mark.parametrize("built", ["meta", "recorded"])
def test_a_model_that_is_cast_is_never_held_in_two_dtypes(built: str) -> None:
    pytest.importorskip("transformers")
    # What is freed goes back at once, however the heap looks.
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, built],
        capture_output=True,
        text=True,
        env={**os.environ, **at_once},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, final, largest = map(int, done.stdout.split())
    assert final > 3 * largest
    assert peak <= final + largest + 50 * 2**20

"""A fixed sample of 40 architectures, recorded and replayed; for all, see the zoo.

Spread evenly over the names of those that eager construction builds from a small
configuration: language, vision, speech, mixtures of experts, several towers.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import transformers
from packaging.version import Version
from zoo import by_recording
from zoo_cases import Case, transformers_cases

pytestmark = [pytest.mark.hf, pytest.mark.slow]

MODEL = (
    "afmoe bamba bloom cohere cvt deit efficientloftr flaubert gemma4_vision glm_image "
    "gpt_neo grounding-dino idefics3_vision kosmos-2 llama4_text maskformer-swin "
    "mistral4 mpnet nllb-moe paligemma pixtral qwen2_5_vl qwen3_moe rembert "
    "sam3_tracker siglip2_vision_model swin2sr udop visual_bert xclip"
)
CAUSAL_LM = (
    "arcee camembert emu3 git granite_swa lfm2 minimax_m3_vl_text openai-gpt "
    "qwen3_5_moe_text stablelm"
)
# The release that the sample was chosen with; older ones build fewer.
CHOSEN_WITH = Version("5.24")
SAMPLE = [f"AutoModel/{name}" for name in MODEL.split()]
SAMPLE += [f"AutoModelForCausalLM/{name}" for name in CAUSAL_LM.split()]


@pytest.fixture(scope="module")
def cases(quiet_transformers: None) -> dict[str, Case]:
    return {case.name: case for case in transformers_cases()}


def test_the_sample_has_forty_architectures() -> None:
    assert len(set(SAMPLE)) == 40


@pytest.mark.parametrize("name", SAMPLE)
def test_recorded_and_replayed_equals_eager(name: str, cases: dict[str, Case]) -> None:
    if name not in cases:
        pytest.skip("this release of transformers does not have it")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = by_recording(cases[name], limit_s=60)
    finally:
        torch.set_num_threads(threads)
    is_older = Version(transformers.__version__) < CHOSEN_WITH
    if is_older and result.status == "unbuildable":
        pytest.skip(f"this release cannot build it at all: {result.cause}")
    assert result.status == "equal", result.cause
    assert result.num_tensors > 0

"""A fixed sample of Hugging Face architectures; for all, see `benchmarks/zoo_meta.py`.

Each has something of its own: attention free, mixtures of experts, speech, vision,
detection, several towers, codecs, time series, rotary tables of many kinds.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import transformers
import zoo_configs
import zoo_meta
from packaging.version import Version

pytestmark = [pytest.mark.hf, pytest.mark.slow]

# The release that the tiny configurations were chosen with; older ones build fewer.
CHOSEN_WITH = Version("5.24")

SAMPLE = [
    "base/albert",
    "base/beit",
    "base/bloom",
    "base/clip",
    "base/convnextv2",
    "base/data2vec-audio",
    "base/hubert",
    "base/levit",
    "base/mobilevit",
    "base/reformer",
    "base/sam2",
    "base/sam3_vit_model",
    "base/swinv2",
    "base/tapas",
    "base/xlnet",
    "causal/deepseek_v3",
    "causal/falcon_mamba",
    "causal/gpt_oss",
    "causal/phi3",
    "causal/qwen3_next",
    "causal/rwkv",
    "causal/bamba",
    "causal/xlstm",
    "base/speecht5",
    "base/patchtst",
    "base/timesfm",
    "base/oneformer",
]


@pytest.fixture(scope="module")
def choices() -> dict[str, int]:
    import json

    return json.loads(zoo_configs.CHOICES.read_text())


@pytest.mark.parametrize("rng", ["eager", "by_name"])
@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_built_on_meta_is_right(
    name: str, rng: str, choices: dict[str, int]
) -> None:
    kind, _, model_type = name.partition("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the architectures' own
        build = zoo_configs.builder(kind, model_type, choices[name])
        result = zoo_meta.by_meta(name, build, limit_s=30, rng=rng)
    if (
        result.status == "unbuildable"
        and Version(transformers.__version__) < CHOSEN_WITH
    ):
        pytest.skip(f"this release cannot build it at all: {result.cause}")
    expected = ["equal"] if rng == "eager" else ["equal", "ok"]
    assert result.status in expected, result.cause

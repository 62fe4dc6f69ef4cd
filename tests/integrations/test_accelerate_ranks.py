"""Real accelerate on two gloo ranks, and the scripts for it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RunScript = Callable[..., str]
Results = dict[str, dict[str, Any]]

pytestmark = [pytest.mark.hf, pytest.mark.distributed, pytest.mark.slow]

# Class of the parameters, and how many each of the two groups of the optimizer has.
CASES = {
    "ddp_tied": (["Parameter"], [15, 4]),
    "ddp_apart": (["Parameter"], [15, 4]),
    "ddp_one_real": (["Parameter"], [15, 4]),
    "fsdp1_untied": (["Parameter"], [16, 4]),
    "fsdp1_tied": (["Parameter"], [15, 4]),
    "fsdp2_tied": (["DTensor"], [15, 4]),
    "fsdp2_one_real": (["DTensor"], [15, 4]),
    "fsdp2_ram_buffer": (["DTensor"], [15, 4]),
    "fsdp2_ram_untied": (["DTensor"], [16, 4]),
    "fsdp2_ram_untied_compiled": (["DTensor"], [16, 4]),
    "tp": (["DTensor", "Parameter"], [15, 4]),
    "tp_untied": (["DTensor", "Parameter"], [16, 4]),
    "tp_by_hand": (["DTensor", "Parameter"], [15, 4]),
}


@pytest.fixture(scope="module")
def results(run_script: RunScript) -> Results:
    """Every case, in one pair of processes."""
    script = "tests/integrations/accelerate_ranks.py"
    printed = run_script(script, *CASES, ranks=2).splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_start_from_the_eager_values_train_save_and_load(
    case: str, results: Results
) -> None:
    result = results[case]
    assert result["start"] == result["eager"]
    assert (result["classes"], result["groups"]) == CASES[case]
    assert result["strangers"] == 0
    assert result["moved"] != result["start"]
    assert result["tied"] == ("untied" not in case)
    if not case.startswith("tp"):
        assert result["again"] == result["moved"]
    # FSDP1 materializes its units one by one, without a report of the whole.
    assert result["reports_ok"] == ([] if "fsdp1" in case else [True])
    assert result["unwrapped"].endswith("LlamaForCausalLM")


def test_however_a_model_is_sharded_training_is_the_same(results: Results) -> None:
    for one, other in (
        ("ddp_tied", "ddp_apart"),
        ("ddp_tied", "ddp_one_real"),
        ("ddp_tied", "fsdp1_tied"),
        ("ddp_tied", "fsdp2_tied"),
        ("ddp_tied", "fsdp2_one_real"),
        ("tp", "tp_by_hand"),
        ("fsdp1_untied", "fsdp2_ram_untied_compiled"),
    ):
        assert results[one]["losses"] == results[other]["losses"]
        assert results[one]["moved"] == results[other]["moved"]


# What users of accelerate reported, by row of `docs/reports.md`.


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a10_real_on_one_rank_and_on_meta_on_the_other_is_the_model_of_the_real_one(
    how: str, results: Results
) -> None:
    mixed, alike = results[f"{how}_one_real"], results[f"{how}_tied"]
    assert mixed["start"] == mixed["eager"]
    assert mixed["names"] == alike["names"]
    assert (mixed["losses"], mixed["moved"]) == (alike["losses"], alike["moved"])


def test_b19_fsdp1_fills_a_tie_once_and_both_places_train_it(results: Results) -> None:
    result = results["fsdp1_tied"]
    assert result["tied"]
    assert result["start"] == result["eager"]
    assert result["groups"][0] == results["fsdp1_untied"]["groups"][0] - 1
    assert result["moved"] == results["ddp_tied"]["moved"]


def test_f82_under_fsdp2_the_optimizer_finds_each_parameter_ties_included(
    results: Results,
) -> None:
    for case, groups in (("fsdp2_tied", [15, 4]), ("fsdp2_ram_untied", [16, 4])):
        result = results[case]
        assert result["groups"] == groups
        assert result["strangers"] == 0
        assert result["stepped"] == sum(groups)


def test_f83_a_compiled_model_under_fsdp2_has_the_names_of_one_that_is_not(
    results: Results,
) -> None:
    compiled, plain = results["fsdp2_ram_untied_compiled"], results["fsdp2_ram_untied"]
    assert compiled["compiled"]
    assert not plain["compiled"]
    assert "lm_head.weight" in compiled["names"]
    assert compiled["names"] == plain["names"]
    assert compiled["again"] == compiled["moved"] == plain["moved"]


def test_a_persistent_buffer_is_made_on_every_rank_under_fsdp2(
    results: Results,
) -> None:
    result = results["fsdp2_ram_buffer"]
    assert "noise" in result["names"]
    assert result["start"] == result["eager"]
    assert result["again"] == result["moved"]


def test_what_is_compiled_was_sharded_and_made_before(results: Results) -> None:
    compiled = {case for case, result in results.items() if result["compiled"]}
    assert compiled == {"fsdp2_ram_untied_compiled"}


@pytest.mark.te
def test_a_converted_model_starts_from_the_eager_values_on_two_ranks(
    run_script: RunScript,
) -> None:
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        pytest.skip(f"Transformer Engine cannot be imported: {error}")
    cases = ("ddp_te", "fsdp1_te_untied", "fsdp2_te", "fsdp2_te_untied")
    script = "tests/integrations/accelerate_ranks.py"
    printed = run_script(script, *cases, ranks=2).splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    assert [row["case"] for row in rows] == list(cases)
    for row in rows:
        assert row["start"] == row["eager"]
        assert row["layers"] == 20  # 14 and the head, 5 norms
        assert row["tied"] == ("untied" not in row["case"])
        assert row["held"]
        assert row["computes"]
        assert row["reports_ok"] == ([] if "fsdp1" in row["case"] else [True])
    assert rows[2]["classes"] == rows[3]["classes"] == ["DTensor"]

"""Seeded faults: each is put into a healthy, materialized model, and must be found."""

from __future__ import annotations

import pytest

from tests.behaviour import faults_of_structure, faults_of_tensors
from tests.behaviour.audit_situation import healthy_situation
from tests.reliability.tally import tally

FAULTS = {**faults_of_structure.FAULTS, **faults_of_tensors.FAULTS}
ALONE = [name for name, fault in FAULTS.items() if fault.alone]


def test_the_situation_itself_is_healthy() -> None:
    situation = healthy_situation()
    assert situation.codes(snapshot=True) == []
    assert situation.codes(snapshot=False) == []


@pytest.mark.parametrize("name", ALONE)
def test_the_audit_alone_finds_that(name: str) -> None:
    code, _, mutate = FAULTS[name]
    situation = healthy_situation()
    mutate(situation)
    assert code in situation.codes(snapshot=False)
    tally["seeded mutations"] += 1


@pytest.mark.parametrize("name", FAULTS)
def test_the_audit_with_a_snapshot_finds_that(name: str) -> None:
    code, _, mutate = FAULTS[name]
    situation = healthy_situation()
    mutate(situation)
    assert code in situation.codes(snapshot=True)
    tally["seeded mutations"] += 1


def test_at_least_25_faults_are_seeded() -> None:
    assert len(FAULTS) >= 25
    assert len(ALONE) >= 20

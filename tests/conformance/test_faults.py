"""The suite itself, tested: the good toy passes everything (test_toy.py), and each broken toy is noticed."""

from __future__ import annotations

import pytest

from slm_conformance import faults_generation, faults_random  # noqa: F401  (they register their own)
from slm_conformance.faults import FAULTS, Fault
from slm_conformance.fixtures import BackendFixtures
from slm_conformance.meta import Verdict, play


def fixtures(fault: Fault) -> BackendFixtures:
    class Broken(BackendFixtures):
        backend = fault.backend
        models = ("llama-f32",)
        kv_types = ("f32",)

    return Broken()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_killed_by_its_scenario(fault: Fault) -> None:
    outcome = play(fixtures(fault), fault.killed_by)
    assert outcome.verdict is Verdict.FAILS, f"{fault.killed_by} does not notice: {fault.breaks}"

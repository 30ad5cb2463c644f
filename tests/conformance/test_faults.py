"""The suite itself, tested: the good toy passes everything (test_toy.py), and each broken toy is noticed."""

from __future__ import annotations

import pytest

from slm_conformance.faults import Fault
from slm_conformance.matrix import all_faults
from slm_conformance.meta import Verdict, play


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: fault.name)
def test_a_fault_is_killed_by_its_scenario(fault: Fault) -> None:
    outcome = play(fault.fixtures(), fault.killed_by)
    assert outcome.verdict is Verdict.FAILS, f"{fault.killed_by} does not notice: {fault.breaks}"

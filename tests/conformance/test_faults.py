"""The suite itself, tested: the good toy passes everything (test_toy.py), and each broken toy is noticed.

Those that are meant for programs above the contract are played in test_programs_above.py.
"""

from __future__ import annotations

import pytest

from slm_conformance.mutants.matrix import all_faults
from slm_conformance.mutants.programs_above import CHAT_PROGRAMS, SESSION_PROGRAMS
from slm_conformance.mutants.registry import Fault
from slm_conformance.suite.meta import Verdict, play

FAULTS = [fault for fault in all_faults() if fault.killed_by not in (CHAT_PROGRAMS, SESSION_PROGRAMS)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_killed_by_its_scenario(fault: Fault) -> None:
    outcome = play(fault.fixtures(), fault.killed_by)
    assert outcome.verdict is Verdict.FAILS, f"{fault.killed_by} does not notice: {fault.breaks}"

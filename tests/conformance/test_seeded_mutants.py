"""Tests of the suite: each mutant of the toy is killed by its scenario; the toy itself passes all (test_toy.py).

test_programs_above.py runs the mutants of random programs above the contract.
"""

from __future__ import annotations

import pytest

from slm_conformance.mutants.matrix import all_mutants
from slm_conformance.mutants.programs_above import CHAT_PROGRAMS, SESSION_PROGRAMS
from slm_conformance.mutants.registry import Mutant
from slm_conformance.suite.meta import Verdict, play

MUTANTS = [mutant for mutant in all_mutants() if mutant.killed_by not in (CHAT_PROGRAMS, SESSION_PROGRAMS)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_scenario(mutant: Mutant) -> None:
    outcome = play(mutant.fixtures(), mutant.killed_by)
    assert outcome.verdict is Verdict.FAILS, f"{mutant.killed_by} does not notice: {mutant.breaks}"

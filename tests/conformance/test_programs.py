"""Random programs kill their mutants, and print runnable scripts."""

from __future__ import annotations

import re

import pytest

from slm_conformance.mutants.random_programs import PROGRAMS
from slm_conformance.mutants.registry import MUTANTS
from slm_conformance.oracle.runs import Run
from slm_conformance.suite.meta import Verdict, play
from slm_conformance.suite.programs.context_steps import Clear, Decode, Drop, Fork, Sizes
from slm_conformance.suite.programs.contract_model import ContractModel
from slm_conformance.suite.programs.random_context_programs import SIZES, ProgramMaker, shrink
from slm_core.errors import ContextFull, InvalidPosition, SlmError, UnsupportedEdit
from slm_core.types import Capability, EditLevel

MOST_CALLS = 6


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.killed_by == PROGRAMS], ids=lambda mutant: mutant.name)
def test_a_mutant_is_reproduced_by_a_short_script(mutant, tmp_path, monkeypatch):
    """The script fails on the mutant in its last line, and passes on the toy."""
    outcome = play(mutant.fixtures(), mutant.killed_by)
    assert outcome.verdict is Verdict.FAILS, mutant.breaks
    script = outcome.reason.partition("\n\n")[2]
    assert len(re.findall(r"context\.\w+\(|decode\(context", script.partition("new_context")[2])) <= MOST_CALLS, script
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, SlmError)) as caught:
        exec(compile(script, "script.py", "exec"), {})
    last = [entry.lineno for entry in caught.traceback if str(entry.path).endswith("script.py")]
    assert last[0] + 1 == len(script.strip().splitlines()), "the script fails before its last line"
    exec(compile(script.replace(mutant.backend, "slm_conformance.toy:ToyBackend"), "script.py", "exec"), {})


def test_a_program_shrinks_to_the_relevant_steps():
    needed = Decode((Run(1, 0, (7,)),)), Drop(1)
    program = [Clear(), Drop(0), Decode((Run(0, 0, (1, 2)), Run(1, 0, (7, 8, 9)))), Clear(), Drop(2), Drop(1), Clear()]

    def fails(steps):
        seven = [i for i, s in enumerate(steps) if isinstance(s, Decode) for r in s.runs if r.tokens[:1] == (7,)]
        return bool(seven) and Drop(1) in steps[seven[0] :]

    assert shrink(program, fails) == list(needed)


def program_of(seed):
    return ProgramMaker(300, EditLevel.CUT, frozenset(Capability), seed=seed, sizes=SIZES[0]).make()


def test_programs_depend_only_on_the_seed():
    assert program_of(5) == program_of(5)
    assert program_of(5) != program_of(6)


@pytest.mark.parametrize(
    ("level", "others"), [(EditLevel.CUT, {ContextFull}), (EditLevel.REPLAY, {ContextFull}), (EditLevel.REPLAY, set())]
)
def test_a_fork_that_splits_a_block_and_has_another_error_may_raise_either(level, others):
    n_ctx = 10 if others else 20
    contract = ContractModel(99, level, frozenset({Capability.BIDIRECTIONAL_BLOCKS}), Sizes(n_ctx, 2, 8, 8))
    contract.play(Decode((Run(0, 0, (1, 2, 3)), Run(0, 0, (4, 5, 6, 7), block=True))))
    partial = {UnsupportedEdit} if level is EditLevel.REPLAY and not others else set()
    assert contract.play(Fork(0, 1, 5)) == ({InvalidPosition, *others, *partial}, True)

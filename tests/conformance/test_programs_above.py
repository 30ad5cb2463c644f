"""Random programs of sessions and chats kill their mutants, and print runnable scripts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slm_conformance.mutants.matrix import all_mutants
from slm_conformance.mutants.programs_above import CHAT_PROGRAMS, SESSION_PROGRAMS
from slm_conformance.mutants.registry import Mutant
from slm_conformance.suite.meta import Verdict, play
from slm_conformance.suite.programs.draws import uniform
from slm_conformance.suite.programs.random_chat_programs import ChatProgramMaker
from slm_conformance.suite.programs.random_session_programs import SessionProgramMaker
from slm_core.errors import SlmError
from slm_core.sampling.stream import UniformStream

MOST_CALLS = 10
MUTANTS = [mutant for mutant in all_mutants() if mutant.killed_by in (SESSION_PROGRAMS, CHAT_PROGRAMS)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_reproduced_by_a_short_script(mutant: Mutant, tmp_path, monkeypatch) -> None:
    outcome = play(mutant.fixtures(), mutant.killed_by)
    assert outcome.verdict is Verdict.FAILS, mutant.breaks
    script = outcome.reason.partition("\n\n")[2]
    calls = re.findall(r"\b[sc]\d\.\w+\(|read\(|aside\(", script.partition("new_context")[2])
    assert len(calls) <= MOST_CALLS, script
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, SlmError)) as caught:
        run(script)
    last = [entry.lineno for entry in caught.traceback if str(entry.path).endswith("script.py")]
    assert last[0] + 1 == len(script.strip().splitlines()), "the script fails before its last line"
    run(script.replace(mutant.backend, "slm_conformance.toy:ToyBackend"))


def run(script: str) -> None:
    """Run the script and close its model, because a mutant is active as long as its model is open."""
    names: dict[str, Any] = {}
    try:
        exec(compile(script, "script.py", "exec"), names)
    finally:
        names["model"].close()


def test_programs_depend_only_on_the_seed() -> None:
    for make in (lambda seed: SessionProgramMaker(300, seed).make(), lambda seed: ChatProgramMaker(seed).make()):
        assert make(5) == make(5)
        assert make(5) != make(6)


def test_the_numbers_of_a_stream_equal_the_draws_of_chains() -> None:
    for seed, stream in ((0, 0), (5, 0), (5, 3), (2**63 - 1, 1)):
        drawn = UniformStream(seed, stream)
        assert [drawn.take() for _ in range(5)] == [uniform(seed, stream, n) for n in range(5)]

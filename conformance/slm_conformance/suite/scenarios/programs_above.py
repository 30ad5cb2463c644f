"""Random programs above the contract: sessions and chats are compared with simple models of both in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs import random_chat_programs, random_session_programs
from slm_conformance.suite.programs.chat_programs import ChatPlayer
from slm_conformance.suite.programs.chat_steps import ChatStep
from slm_conformance.suite.programs.context_programs import Mismatch
from slm_conformance.suite.programs.random_chat_programs import ChatProgramMaker
from slm_conformance.suite.programs.random_context_programs import shrink
from slm_conformance.suite.programs.random_session_programs import SessionProgramMaker
from slm_conformance.suite.programs.session_programs import SessionPlayer
from slm_conformance.suite.programs.session_steps import Step
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.model_based import opening, seeds

N_PROGRAMS = 8
"""Programs of about 40 steps each, enough to kill each mutant of these scenarios."""

N_TRIES = 120
"""The largest number of programs that are played to shrink one; each takes some tenths of a second."""

_Step = TypeVar("_Step")


class TestSessionPrograms(Scenarios):
    """Sessions: any sequence of calls gives the results that the calls describe one by one."""

    above_contract = True
    on_one_model = ("test_random_programs",)

    def test_random_programs(self, bench: Bench) -> None:
        """Session: programs of random calls hold; a program that fails is shrunk and printed as a script."""
        play_session_programs(bench, seeds(bench, N_PROGRAMS, at_least=2))


class TestChatPrograms(Scenarios):
    """Chats and oracles: any sequence of calls gives the results that the calls describe one by one."""

    above_contract = True
    on_one_model = ("test_random_programs",)

    def test_random_programs(self, bench: Bench) -> None:
        """Chat: programs of random calls hold; a program that fails is shrunk and printed as a script."""
        play_chat_programs(bench, seeds(bench, N_PROGRAMS, at_least=2))


def play_session_programs(bench: Bench, program_seeds: Iterable[int]) -> None:
    """Play a program for each seed; fail with the script of the first program that fails."""
    bench.weights()  # skips models without a reference
    for seed in program_seeds:

        def play(program: Sequence[Step], n_seq_max: int = 2 + seed % 3) -> None:
            SessionPlayer(bench, opening(bench), n_seq_max).play(program)

        program = SessionProgramMaker(bench.model.info.n_vocab, seed).make()
        _play(program, play, random_session_programs.plainer)


def play_chat_programs(bench: Bench, program_seeds: Iterable[int]) -> None:
    """Play a chat program for each seed; fail with the script of the first program that fails."""
    bench.weights()
    for seed in program_seeds:

        def play(program: Sequence[ChatStep], n_seq_max: int = 2 + seed % 3, options: int = seed % 3) -> None:
            ChatPlayer(bench, opening(bench), n_seq_max, options).play(program)

        _play(ChatProgramMaker(seed).make(), play, random_chat_programs.plainer)


def _play(
    program: list[_Step], play: Callable[[Sequence[_Step]], None], plainer: Callable[[_Step], Iterator[_Step]]
) -> None:
    if not _mismatch(program, play):
        return
    shorter: Any = shrink(program, lambda smaller: bool(_mismatch(smaller, play)), N_TRIES)  # type: ignore[arg-type]
    for i, step in enumerate(shorter):
        for other in plainer(step):
            plain = [*shorter[:i], other, *shorter[i + 1 :]]
            if _mismatch(plain, play):
                shorter = plain
    pytest.fail(_mismatch(shorter, play), pytrace=False)


def _mismatch(program: Any, play: Callable[[Any], None]) -> str:
    """The script that shows a failure of a program; "" if it does not fail."""
    try:
        play(program)
    except Mismatch as mismatch:
        return str(mismatch)
    return ""

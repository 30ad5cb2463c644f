"""Toys above which sessions are broken."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slm_conformance.mutants.above import Above, breaks
from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.chat import Session, session_dump
from slm_core.chat.decoded import DecodedSequence
from slm_core.chat.marks import Mark, Marks
from slm_core.chat.source import SessionSource
from slm_core.errors import ContextFull, InvalidOption
from slm_core.types import EditLevel

# ruff: noqa: N802, SLF001  (the names are those of backends; mutants change internals)


@breaks("TestSession::test_append", Session, "append")
def PlainTextIsParsed(whole: Any, session: Session, content: Any) -> int:
    """Control tokens that an appended text spells become control tokens."""
    if not isinstance(content, str):
        return int(whole(session, content))
    ids = session.vocab.encode(content, add_special=not session.tokens, parse_special=True)
    session.append_tokens(ids)
    return len(ids)


@breaks("TestSession::test_more_than_there_is_room_for", Session, "append_tokens")
def AppendsThenChecks(whole: Any, session: Session, tokens: Sequence[int]) -> None:
    """Tokens are appended before the check that they fit."""
    try:
        whole(session, tokens)
    except ContextFull:
        session._edited([*session._source.tokens, *tokens])
        raise


@breaks("TestSession::test_rollback", Session, "rollback")
def MarksServeOnce(whole: Any, session: Session, mark: Any) -> None:
    """A mark is removed when it is used."""
    whole(session, mark)
    del session._source.marks._places[mark]


@breaks("TestSession::test_rollback", Session, "rollback")
def RollbacksKeepLogits(whole: Any, session: Session, mark: Mark) -> None:
    """After a rollback, the next logits are those before it."""
    row = session._source.decoded.row
    whole(session, mark)
    session._source.decoded.keep(row)


@breaks("TestSession::test_a_fork_draws_as_the_original", Session, "fork")
def ForksDrawAnew(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork restarts the random stream."""
    twin: Session = whole(session, seq_id)
    twin._sampler.reset()
    return twin


@mutant("TestSession::test_rollback")
class ReplayKeepsTheTail(Above):
    """At level REPLAY, tokens that are rolled back stay in the context."""

    owner, attribute = DecodedSequence, "forget_from"

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, EditLevel.REPLAY, context_type)

    @staticmethod
    def broken(decoded: DecodedSequence, length: int) -> None:
        """Nothing can be truncated, so leave it."""


@breaks("TestSession::test_marks_that_are_stale_or_foreign", Marks, "truncate")
def StaleMarksStay(whole: Any, marks: Marks, length: int) -> None:
    """A stale mark is accepted, and means the end."""
    marks.bring_back({mark: min(place, length) for mark, place in marks.places().items()})


@breaks("TestSession::test_marks_that_are_stale_or_foreign", Marks, "place")
def AnyonesMarks(whole: Any, marks: Marks, mark: Mark) -> int:
    """A mark of another session is accepted."""
    return int(whole(mark._marks(), mark))


@breaks("TestSession::test_remove_exactly", Session, "remove_span")
def ExactIsIgnored(whole: Any, session: Session, start: int, end: int, *, exact: bool = False) -> Any:
    """``remove(exact=True)`` cuts, and reports that it decoded again."""
    level = whole(session, start, end)
    return min(level, EditLevel.TRUNCATE) if exact else level


@breaks("TestSession::test_remove", Session, "remove")
def RemovesAlwaysExactly(whole: Any, session: Session, start: Any, end: Any, *, exact: bool = False) -> Any:
    """``remove`` decodes again even if the context has cuts."""
    return whole(
        session, start, end, exact=exact or session._source.marks.place(start) != session._source.marks.place(end)
    )


@breaks("TestSession::test_marks_after_a_removal", Marks, "remove")
def MarksStayBehind(whole: Any, marks: Marks, start: int, end: int) -> None:
    """Marks do not move when tokens before them are cut."""


@breaks("TestSession::test_fork", Session, "fork")
def ForksChooseTheirSequence(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork uses the first free sequence, not the requested one."""
    twin: Session = whole(session)
    return twin


@breaks("TestSession::test_fork", Session, "fork")
def ForksShareTheirTokens(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork and its original share one list of tokens until either is edited."""
    twin: Session = whole(session, seq_id)
    twin._source.tokens = session._source.tokens
    return twin


@breaks("TestSession::test_a_fork_draws_as_the_original", Session, "fork")
def ForksShareTheirSampler(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork and its original draw from one stream."""
    twin: Session = whole(session, seq_id)
    twin._sampler = session._sampler
    return twin


@breaks("TestSession::test_dump_in_mid_answer", session_dump, "write")
def DumpWithoutPendingText(whole: Any, state: Any) -> bytes:
    """A dump of a paused answer lacks the bytes of an incomplete character."""
    if state.answer is not None:
        progress = dataclasses.replace(state.answer.progress, pending=b"")
        state = dataclasses.replace(state, answer=dataclasses.replace(state.answer, progress=progress))
    return bytes(whole(state))


@breaks("TestSession::test_a_scratch_branch", Session, "scratch_branch")
@contextlib.contextmanager
def ScratchBranchesForgetMarks(whole: Any, session: Session) -> Iterator[Session]:
    """A scratch branch in the session itself loses the marks after its start."""
    before = session._source.marks.places()
    with whole(session) as elsewhere:
        yield elsewhere
        lost = [mark for mark in before if elsewhere is session and mark not in session._source.marks.places()]
    for mark in lost:
        del session._source.marks._places[mark]


@breaks("TestSession::test_a_mark_at_the_end", Session, "remove_span")
def NothingIsComputedAgain(whole: Any, session: Session, start: int, end: int, *, exact: bool = False) -> EditLevel:
    """Removing nothing reports that later tokens were decoded again."""
    level: EditLevel = whole(session, start, end, exact=exact)
    return min(level, EditLevel.TRUNCATE) if start == end else level


@breaks("TestSession::test_a_scratch_branch_takes_no_draws", Session, "scratch_branch")
@contextlib.contextmanager
def ScratchBranchesDraw(whole: Any, session: Session) -> Iterator[Session]:
    """A scratch branch in the session itself advances the random stream."""
    drawn = session._sampler.state()
    try:
        with whole(session) as elsewhere:
            try:
                yield elsewhere
            finally:
                drawn = session._sampler.state()
    finally:
        session._sampler.set_state(drawn)


@breaks("TestSession::test_a_scratch_branch_in_a_full_context", Session, "_return_to")
def ScratchBranchesNeedRoom(whole: Any, session: Session, tokens: list[int], n_held: int) -> None:
    """A scratch branch in the session itself is rolled back only if the pending tokens have room."""
    session.follow(tokens)
    whole(session, tokens, n_held)


@breaks("TestSession::test_a_restored_answer_goes_on_counting", Session, "_load")
def RestoredAnswersCountAnew(whole: Any, session: Session, state: Any) -> None:
    """``min_tokens`` of a restored answer counts from 0."""
    whole(session, state)
    session._sampler.set_history(session._source.tokens)


@breaks("TestSession::test_refused_options", Session, "generate")
def RefusedOptionsEndTheAnswer(whole: Any, session: Session, *args: Any, **options: Any) -> Any:
    """Refused options end the current answer."""
    try:
        return whole(session, *args, **options)
    except InvalidOption:
        session._abandon()
        raise


@breaks("TestSession::test_close", SessionSource, "check_open")
def ClosedSessionsGoOn(whole: Any, source: SessionSource) -> None:
    """A closed session accepts all calls."""

"""Mutants that break sessions."""

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

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


@breaks("TestSession::test_append", Session, "append")
def PlainTextIsParsed(original: Any, session: Session, content: Any) -> int:
    """Control tokens that an appended text spells become control tokens."""
    if not isinstance(content, str):
        return int(original(session, content))
    ids = session.vocab.encode(content, add_special=not session.tokens, parse_special=True)
    session.append_tokens(ids)
    return len(ids)


@breaks("TestSession::test_more_than_there_is_room_for", Session, "append_tokens")
def AppendsThenChecks(original: Any, session: Session, tokens: Sequence[int]) -> None:
    """Tokens that do not fit are appended, although ``ContextFull`` is raised."""
    try:
        original(session, tokens)
    except ContextFull:
        session._edited([*session._source.inputs, *tokens])
        raise


@breaks("TestSession::test_in_batches", Session, "next_logits")
def PrefillsAreSilent(original: Any, session: Session, *args: Any, progress: Any = None, **options: Any) -> Any:
    """``next_logits`` reports no progress."""
    return original(session, *args, **options)


@breaks("TestSession::test_expected_tokens", Session, "next_logits")
def ExpectedTokensWait(original: Any, session: Session, *args: Any, expected: Any = (), **options: Any) -> Any:
    """Expected tokens are not decoded with the history."""
    return original(session, *args, **options)


@breaks("TestSession::test_rollback", Session, "rollback")
def MarksServeOnce(original: Any, session: Session, mark: Any) -> None:
    """A mark is removed when it is used."""
    original(session, mark)
    del session._source.marks._places[mark]


@breaks("TestSession::test_rollback", Session, "rollback")
def RollbacksKeepLogits(original: Any, session: Session, mark: Mark) -> None:
    """After a rollback, the next logits are still those from before the rollback."""
    row = session._source.decoded.row
    original(session, mark)
    session._source.decoded.keep(row)


@breaks("TestSession::test_a_fork_draws_as_the_original", Session, "fork")
def ForksDrawAnew(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork restarts the random stream."""
    copied: Session = original(session, seq_id)
    copied._sampler.reset()
    return copied


@mutant("TestSession::test_rollback")
class ReplayKeepsTheTail(Above):
    """At level REPLAY, tokens that are rolled back stay in the context."""

    owner, attribute = DecodedSequence, "forget_from"

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, EditLevel.REPLAY, context_type)

    @staticmethod
    def broken(decoded: DecodedSequence, length: int) -> None:
        """Keep the tokens in the context."""


@breaks("TestSession::test_marks_that_are_stale_or_foreign", Marks, "truncate")
def StaleMarksStay(original: Any, marks: Marks, length: int) -> None:
    """A stale mark is accepted, and marks the end."""
    marks.bring_back({mark: min(position, length) for mark, position in marks.places().items()})


@breaks("TestSession::test_marks_that_are_stale_or_foreign", Marks, "place")
def AnyonesMarks(original: Any, marks: Marks, mark: Mark) -> int:
    """A mark of another session is accepted."""
    return int(original(mark._marks(), mark))


@breaks("TestSession::test_remove_exactly", Session, "remove_span")
def ExactIsIgnored(original: Any, session: Session, start: int, end: int, *, exact: bool = False) -> Any:
    """``remove(exact=True)`` cuts, but reports that it decoded later tokens again."""
    level = original(session, start, end)
    return min(level, EditLevel.TRUNCATE) if exact else level


@breaks("TestSession::test_remove", Session, "remove")
def RemovesAlwaysExactly(original: Any, session: Session, start: Any, end: Any, *, exact: bool = False) -> Any:
    """``remove`` decodes later tokens again even if the context can cut."""
    return original(
        session, start, end, exact=exact or session._source.marks.place(start) != session._source.marks.place(end)
    )


@breaks("TestSession::test_marks_after_a_removal", Marks, "remove")
def MarksStayBehind(original: Any, marks: Marks, start: int, end: int) -> None:
    """Marks do not move when tokens before them are cut."""


@breaks("TestSession::test_fork", Session, "fork")
def ForksChooseTheirSequence(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork uses the first free sequence, not the requested one."""
    copied: Session = original(session)
    return copied


@breaks("TestSession::test_fork", Session, "fork")
def ForksShareTheirTokens(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork and its original share one list of tokens until either is edited."""
    copied: Session = original(session, seq_id)
    copied._source.inputs = session._source.inputs
    return copied


@breaks("TestSession::test_a_fork_draws_as_the_original", Session, "fork")
def ForksShareTheirSampler(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork and its original draw from one stream."""
    copied: Session = original(session, seq_id)
    copied._sampler = session._sampler
    return copied


@breaks("TestSession::test_dump_in_mid_answer", session_dump, "write")
def DumpWithoutPendingText(original: Any, state: Any) -> bytes:
    """A dump of a paused answer lacks the bytes of an incomplete character."""
    if state.answer is not None:
        progress = dataclasses.replace(state.answer.progress, pending=b"")
        state = dataclasses.replace(state, answer=dataclasses.replace(state.answer, progress=progress))
    return bytes(original(state))


@breaks("TestSession::test_a_scratch_branch", Session, "scratch_branch")
@contextlib.contextmanager
def ScratchBranchesForgetMarks(original: Any, session: Session) -> Iterator[Session]:
    """A scratch branch in the session itself loses the marks after its start."""
    before = session._source.marks.places()
    with original(session) as elsewhere:
        yield elsewhere
        lost = [mark for mark in before if elsewhere is session and mark not in session._source.marks.places()]
    for mark in lost:
        del session._source.marks._places[mark]


@breaks("TestSession::test_a_mark_at_the_end", Session, "remove_span")
def NothingIsComputedAgain(original: Any, session: Session, start: int, end: int, *, exact: bool = False) -> EditLevel:
    """Removing nothing reports that later tokens were decoded again."""
    level: EditLevel = original(session, start, end, exact=exact)
    return min(level, EditLevel.TRUNCATE) if start == end else level


@breaks("TestSession::test_a_scratch_branch_takes_no_draws", Session, "scratch_branch")
@contextlib.contextmanager
def ScratchBranchesDraw(original: Any, session: Session) -> Iterator[Session]:
    """A scratch branch in the session itself advances the random stream."""
    drawn = session._sampler.state()
    try:
        with original(session) as elsewhere:
            try:
                yield elsewhere
            finally:
                drawn = session._sampler.state()
    finally:
        session._sampler.set_state(drawn)


@breaks("TestSession::test_a_scratch_branch_in_a_full_context", Session, "_return_to")
def ScratchBranchesNeedRoom(original: Any, session: Session, tokens: list[int], n_held: int) -> None:
    """A scratch branch in the session itself is rolled back only if the pending tokens have room."""
    session.follow(tokens)
    original(session, tokens, n_held)


@breaks("TestSession::test_a_restored_answer_goes_on_counting", Session, "_load")
def RestoredAnswersCountAnew(original: Any, session: Session, state: Any) -> None:
    """``min_tokens`` of a restored answer counts from 0."""
    original(session, state)
    session._sampler.set_history(session._source.history)


@breaks("TestSession::test_refused_options", Session, "generate")
def RefusedOptionsEndTheAnswer(original: Any, session: Session, *args: Any, **options: Any) -> Any:
    """A call with invalid options ends the current answer."""
    try:
        return original(session, *args, **options)
    except InvalidOption:
        session._abandon()
        raise


@breaks("TestSession::test_close", SessionSource, "check_open")
def ClosedSessionsGoOn(original: Any, source: SessionSource) -> None:
    """A closed session accepts all calls."""

"""Mutants of sessions and chats that fail only after an unusual order of calls."""

from __future__ import annotations

from typing import Any

from slm_conformance.mutants.above import breaks
from slm_core.chat import Chat, Oracle, Session
from slm_core.chat.marks import Marks
from slm_core.generation import Answer
from slm_core.types import EditLevel

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)

SESSION_PROGRAMS = "TestSessionPrograms::test_random_programs"
CHAT_PROGRAMS = "TestChatPrograms::test_random_programs"


@breaks(SESSION_PROGRAMS, Session, "fork")
def ForksLoseWhatWaits(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """If its original has two or more pending tokens, a fork loses them."""
    copied: Session = original(session, seq_id)
    if session.n_pending > 1:
        copied._source.inputs = copied._source.inputs[: session.n_tokens - session.n_pending]
    return copied


@breaks(SESSION_PROGRAMS, Marks, "remove")
def MarksAtTheEndStay(original: Any, marks: Marks, start: int, end: int) -> None:
    """A mark at the end of a removed range keeps its position, and then marks another token."""
    behind = {mark: position for mark, position in marks.places().items() if position == end}
    original(marks, start, end)
    marks.bring_back(behind)


@breaks(SESSION_PROGRAMS, Session, "fork")
def ForksBeginAnew(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork restarts the random stream."""
    copied: Session = original(session, seq_id)
    copied._sampler.reset()
    return copied


@breaks(CHAT_PROGRAMS, Chat, "forget")
def ForgottenAreListed(original: Any, chat: Chat, i: int) -> EditLevel:
    """A forgotten message stays in the list of messages."""
    chat._settle()
    messages = chat.messages
    level: EditLevel = original(chat, i)
    chat._messages = messages
    return level


@breaks(CHAT_PROGRAMS, Oracle, "_ask")
def QuestionsEndAnswersTwice(original: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """If an oracle's question ends a streamed answer, the answer is in the chat twice."""
    chat, streams = asker._chat, asker._chat._stream is not None
    answer: Answer = original(asker, *args, **options)
    if streams:
        chat._messages += chat._messages[-1:]
    return answer

"""Toys above which sessions or chats are broken in ways that an odd order of calls brings out."""

from __future__ import annotations

from typing import Any

from slm_conformance.mutants.above import breaks
from slm_core.chat import Chat, Oracle, Session
from slm_core.chat.marks import Marks
from slm_core.generation import Answer
from slm_core.types import EditLevel

# ruff: noqa: N802, SLF001  (the names are those of backends; mutants change internals)

SESSION_PROGRAMS = "TestSessionPrograms::test_random_programs"
CHAT_PROGRAMS = "TestChatPrograms::test_random_programs"


@breaks(SESSION_PROGRAMS, Session, "fork")
def ForksLoseWhatWaits(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork loses two or more pending tokens of its original."""
    twin: Session = whole(session, seq_id)
    if session.n_pending > 1:
        twin._source.tokens = twin._source.tokens[: session.n_tokens - session.n_pending]
    return twin


@breaks(SESSION_PROGRAMS, Marks, "remove")
def MarksAtTheEndStay(whole: Any, marks: Marks, start: int, end: int) -> None:
    """A mark at the end of a removed range does not move, and then marks another token."""
    behind = {mark: place for mark, place in marks.places().items() if place == end}
    whole(marks, start, end)
    marks.bring_back(behind)


@breaks(SESSION_PROGRAMS, Session, "fork")
def ForksBeginAnew(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork restarts the random stream."""
    twin: Session = whole(session, seq_id)
    twin._sampler.reset()
    return twin


@breaks(CHAT_PROGRAMS, Chat, "forget")
def ForgottenAreListed(whole: Any, chat: Chat, i: int) -> EditLevel:
    """A forgotten message is still listed in the messages."""
    chat._settle()
    messages = chat.messages
    level: EditLevel = whole(chat, i)
    chat._messages = messages
    return level


@breaks(CHAT_PROGRAMS, Oracle, "_ask")
def QuestionsEndAnswersTwice(whole: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """If a question ends an answer, the text of the answer is in the chat twice."""
    chat, streams = asker._chat, asker._chat._stream is not None
    answer: Answer = whole(asker, *args, **options)
    if streams:
        chat._messages += chat._messages[-1:]
    return answer

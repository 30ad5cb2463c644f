"""Toys above which sessions or chats are broken in ways that an odd order of calls brings out."""

from __future__ import annotations

from typing import Any

from slm_conformance.above import breaks
from slm_core.chat import Chat, Oracle, Session
from slm_core.generation import Answer
from slm_core.generation.scoring import Score
from slm_core.types import EditLevel

# ruff: noqa: N802, SLF001  (the names are those of backends; faults are inside)

SESSION_PROGRAMS = "TestSessionPrograms::test_random_programs"
CHAT_PROGRAMS = "TestChatPrograms::test_random_programs"


@breaks(SESSION_PROGRAMS, Session, "fork")
def ForksLoseWhatWaits(whole: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork has none of the tokens that its original has yet to decode, where these are two or more."""
    twin: Session = whole(session, seq_id)
    if session.n_pending > 1:
        twin._tokens = twin._tokens[: session.n_tokens - session.n_pending]
    return twin


@breaks(SESSION_PROGRAMS, Session, "remove_span")
def RemovalsKeepTheAnswer(whole: Any, session: Session, start: int, end: int, *, exact: bool = False) -> EditLevel:
    """An answer that is paused goes on after something before it was removed."""
    running = session._generation
    level: EditLevel = whole(session, start, end, exact=exact)
    session._generation = running
    return level


@breaks(SESSION_PROGRAMS, Session, "score")
def ScoresDraw(whole: Any, session: Session, content: Any, *, top: int = 0) -> Score:
    """To score tokens takes a number of the session's stream."""
    session._sampler.uniform()
    score: Score = whole(session, content, top=top)
    return score


@breaks(CHAT_PROGRAMS, Chat, "delete")
def DeletesOfTheLastStay(whole: Any, chat: Chat, i: int) -> None:
    """A last message that is deleted by its index from the end stays in the cache."""
    messages = chat.messages
    if i == -1 and len(messages) > 1 and chat._turn is None:
        chat._messages = messages[:-1]
    else:
        whole(chat, i)


@breaks(CHAT_PROGRAMS, Oracle, "_ask")
def QuestionsEndAnswersTwice(whole: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """What was said of an answer that a question ends is in the chat twice."""
    chat, streams = asker._chat, asker._chat._stream is not None
    answer: Answer = whole(asker, *args, **options)
    if streams:
        chat._messages += chat._messages[-1:]
    return answer

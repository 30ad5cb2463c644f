"""Ctrl-C during a call of a session: the session is as before the call, or as after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from interrupting import interrupted, n_calls_of
from scripted import ByteVocab, ScriptedContext, TagFormatter
from slm_core import interrupts
from slm_core.chat import Chat, Session
from slm_core.types import EditLevel

TEXT = "a history of forty tokens, all decoded.."
EVERY = 3
"""Interrupt every third call of a Python function: the places between are alike."""

Call = Callable[[Session], object]
CALLS: dict[str, Call] = {
    "append": lambda session: session.append("more text"),
    "truncate": lambda session: session.truncate(25),
    "remove_span": lambda session: session.remove_span(3, 9),
    "remove_span exact": lambda session: session.remove_span(3, 9, exact=True),
    "follow": lambda session: session.follow((*session.inputs[:20], 65, 66, 67)),
    "next_logits": lambda session: session.next_logits(expected=[70, 71, 72]),
    "fork": lambda session: session.fork().close(),
    "score": lambda session: session.score("some text"),
}


def new_session(level: EditLevel = EditLevel.CUT) -> Session:
    session = Session(ScriptedContext(level=level), ByteVocab())
    session.append(TEXT)
    session.next_logits(expected=list(b" and then"))
    return session


def state_of(session: Session) -> tuple[Any, ...]:
    """The history and its next logits, which depend on every token that the context has decoded, and on all cuts."""
    row = session.next_logits()
    assert session.context.length(session.seq_id) == session.n_tokens - session.n_pending + session._source.n_ahead
    return session.inputs, row.tobytes(), session._source.marks.places()


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_comes_before_or_after_a_call(name: str, level: EditLevel) -> None:
    call, done = CALLS[name], new_session(level)
    before = state_of(new_session(level))
    call(done)
    after = state_of(done)
    twin = new_session(level)
    n_calls = n_calls_of(lambda: call(twin))
    for stop in range(1, n_calls + 1, max(EVERY, n_calls // 120)):
        session = new_session(level)
        has_returned = interrupted(lambda session=session: call(session), stop)
        expected = (after,) if has_returned else (before, after)
        assert state_of(session) in expected, f"{name} was interrupted at call {stop} of {n_calls}"


def answer(session: Session) -> object:
    sampling = slm.Sampling(temperature=1, seed=1, max_tokens=12)
    return list(session.generate(sampling, speculation=slm.Speculation(slm.PromptLookup())))


def test_the_history_of_an_interrupted_answer_continues() -> None:
    session = new_session()
    n_calls = n_calls_of(lambda: answer(session))
    for stop in range(1, n_calls, 37):
        session = new_session()
        interrupted(lambda session=session: answer(session), stop)
        fresh = Session(ScriptedContext(), ByteVocab())
        fresh.append_tokens(session.inputs)
        np.testing.assert_array_equal(session.next_logits(), fresh.next_logits(), f"interrupted at call {stop}")


CHAT_CALLS: dict[str, Callable[[Chat], object]] = {
    "send": lambda chat: chat.send("And then?"),
    "edit": lambda chat: chat.edit(1, "Good morning!"),
    "forget": lambda chat: chat.forget(1),
    "fork": lambda chat: chat.fork().close(),
}


def new_chat() -> Chat:
    sampling = slm.Sampling(temperature=1, seed=3, max_tokens=10)
    session = Session(ScriptedContext(n_ctx=2000), ByteVocab(), sampling=sampling)
    chat = Chat(session, TagFormatter(), system="Be brief.")
    chat.send("Hello!")
    return chat


def conversation_of(chat: Chat) -> tuple[Any, ...]:
    """The messages, and the next answer, which depends on all that the context has decoded."""
    messages = chat.messages
    return messages, chat.send("What next?").tokens


@pytest.mark.parametrize("name", list(CHAT_CALLS))
def test_an_interrupt_comes_before_or_after_a_call_of_a_chat(name: str) -> None:
    call, done = CHAT_CALLS[name], new_chat()
    before = conversation_of(new_chat())
    call(done)
    after = conversation_of(done)
    twin = new_chat()
    n_calls = n_calls_of(lambda: call(twin))
    for stop in range(1, n_calls + 1, max(7, n_calls // 60)):
        chat = new_chat()
        has_returned = interrupted(lambda chat=chat: call(chat), stop)
        expected = (after,) if has_returned else (before, after)
        assert conversation_of(chat) in expected, f"{name} was interrupted at call {stop} of {n_calls}"


class Interrupting(ScriptedContext):
    """A context that sends SIGINT to itself in each decode while ``sends`` is true."""

    def __init__(self) -> None:
        super().__init__(n_batch=64)  # all tokens in one decode
        self.sends = False
        self.on_decode = lambda: signal.raise_signal(signal.SIGINT) if self.sends else None


def test_a_sequence_is_dropped_before_a_due_interrupt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_SOON_S", 2.0)  # on a busy machine, the next call may come late
    context = Interrupting()
    session = Session(context, ByteVocab())
    session.append(TEXT)
    context.sends = True
    session.next_logits()
    context.drop(session.seq_id)
    assert context.length(session.seq_id) == 0
    with pytest.raises(KeyboardInterrupt):
        context.fork_cost(session.seq_id)


def test_a_scratch_branch_is_undone_before_a_due_interrupt_is_raised() -> None:
    context = Interrupting()
    session = Session(context, ByteVocab())
    session.append(TEXT)
    row = session.next_logits()
    before = session.inputs
    others = [
        context.fork(session.seq_id, seq_id) for seq_id in range(1, 4)
    ]  # so that the branch is the session itself
    assert len(others) == 3
    with pytest.raises(KeyboardInterrupt):
        with session.scratch_branch() as branch:
            assert branch is session
            branch.append("a question")
            context.sends = True
            branch.next_logits()
            context.sends = False
        time.sleep(10)
    assert session.inputs == before
    np.testing.assert_array_equal(session.next_logits(), row)

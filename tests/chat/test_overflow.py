"""The messages that a chat drops when its context is too small, and the report of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import ByteVocab, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, ChatOptions, Session
from slm_core.chat.overflow import Summarize, fit, reserved
from slm_core.errors import ContextFull, DecodeFailed, InvalidOption
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, Message, Role

GREEDY = Sampling(temperature=0, max_tokens=20)
NOTE = Message(Role.SYSTEM, "(earlier talk)")


def chat_of(overflow: Any, n_ctx: int = 300, level: EditLevel = EditLevel.CUT) -> Chat:
    context = ScriptedContext(says("fine"), n_ctx=n_ctx, n_batch=64, level=level)
    session = Session(context, ByteVocab(), owns_context=True)
    return Chat(session, TagFormatter(), system="Be kind.", options=ChatOptions(GREEDY, overflow=overflow))


def talk(chat: Chat, n: int) -> list[Any]:
    """Ask n questions of equal length."""
    return [chat.send(f"question number {i:4}") for i in range(n)]


def contents(messages: Any) -> list[str]:
    return [message.content for message in messages]


def is_fresh(chat: Chat) -> bool:
    """Whether the next logits equal those of a new context that holds only the remaining messages."""
    other = Session(ScriptedContext(chat.session.context.script, n_ctx=900, n_batch=64), ByteVocab())
    other.append_tokens(chat.session.tokens)
    return bool(np.array_equal(chat.session.next_logits(), other.next_logits()))


def test_error_drops_nothing() -> None:
    chat = chat_of("error")
    with pytest.raises(ContextFull):
        talk(chat, 9)
    remaining = contents(chat.messages)
    assert remaining[0] == "Be kind." and remaining[1] == "question number    0"
    assert is_fresh(chat)


@pytest.mark.parametrize("overflow", ["truncate_middle", "shift", Summarize(lambda dropped: NOTE)])
@pytest.mark.parametrize("level", list(EditLevel))
def test_dropped_messages_are_reported_and_the_rest_stays(overflow, level) -> None:
    chat = chat_of(overflow, level=level)
    answers = talk(chat, 12)
    assert {answer.text for answer in answers} == {"fine"}
    dropped = [message for answer in answers if answer.overflowed for message in answer.overflowed.messages]
    expected = [text for i in range(12) for text in (f"question number {i:4}", "fine")]
    original = [text for text in contents([*dropped, *chat.messages[1:]]) if text != NOTE.content]
    assert original == expected, "dropped and remaining messages are not the conversation"
    assert chat.messages[0].content == "Be kind."
    assert any(answer.overflowed for answer in answers)


def test_shift_cuts_as_little_as_needed_and_recomputes_nothing() -> None:
    chat = chat_of("shift")
    context = chat.session.context
    sizes, before = [], 0
    for i in range(12):
        n_shared = chat.session.n_tokens - chat.session.n_pending
        answer = chat.send(f"question number {i:4}")
        sizes.append(context.n_decoded - before)
        before = context.n_decoded
        if answer.overflowed is None:
            continue
        assert answer.overflowed.level is EditLevel.CUT
        assert len(answer.overflowed.messages) == 2, "one turn would have been enough"
        assert answer.usage.cached_tokens == n_shared - answer.overflowed.n_tokens
    assert len(set(sizes[1:])) == 1, f"turns of one length decoded different numbers of tokens: {sizes}"


def test_below_cut_the_recomputation_is_reported() -> None:
    chat = chat_of("shift", level=EditLevel.TRUNCATE)
    levels = {answer.overflowed.level for answer in talk(chat, 12) if answer.overflowed}
    assert levels == {EditLevel.TRUNCATE}
    assert is_fresh(chat)


def test_truncate_middle_halves_the_context_and_recomputes_it() -> None:
    chat = chat_of("truncate_middle")
    for i in range(12):
        answer = chat.send(f"question number {i:4}")
        if answer.overflowed:
            assert answer.usage.prompt_tokens <= 150
            assert is_fresh(chat)
            assert answer.overflowed.summary is None


def test_a_summary_replaces_the_dropped_messages() -> None:
    summarized: list[list[str]] = []

    def summarize(dropped: Any) -> Message:
        summarized.append(contents(dropped))
        return Message(Role.SYSTEM, f"{len(dropped)} messages were here")

    chat = chat_of(Summarize(summarize))
    answers = talk(chat, 12)
    assert summarized[0][:2] == ["question number    0", "fine"]
    assert len(summarized) > 1 and summarized[1][0].endswith("messages were here"), (
        "a later summary includes the earlier summary"
    )
    assert chat.messages[1].content == f"{len(summarized[-1])} messages were here"
    assert is_fresh(chat)
    last = [answer.overflowed for answer in answers if answer.overflowed][-1]
    assert last.summary == chat.messages[1] and last.policy == "summarize"


@pytest.mark.parametrize("overflow", ["error", "truncate_middle", "shift", Summarize(lambda dropped: NOTE)])
def test_a_question_that_never_fits_changes_nothing(overflow) -> None:
    chat = chat_of(overflow)
    talk(chat, 2)
    before, tokens = chat.messages, chat.session.tokens
    with pytest.raises(ContextFull):
        chat.send("x" * 290)
    assert (chat.messages, chat.session.tokens) == (before, tokens)
    assert chat.send("short").text == "fine"


def test_a_summary_needs_a_function() -> None:
    with pytest.raises(InvalidOption, match=r"Summarize\('short'\) \(accepted: a function\)"):
        Summarize("short")


def test_a_failed_or_too_long_summary_changes_nothing() -> None:
    def fail(dropped: Any) -> Message:
        raise ValueError("no summary today")

    for function, error in ((fail, ValueError), (lambda dropped: Message(Role.SYSTEM, "y" * 290), ContextFull)):
        chat = chat_of(Summarize(function))
        with pytest.raises(error):
            talk(chat, 12)
        assert contents(chat.messages)[1] == "question number    0"
        assert is_fresh(chat)


@pytest.mark.parametrize("overflow", ["truncate_middle", "shift"])
def test_a_failed_answer_restores_the_dropped_messages(overflow) -> None:
    chat, n = chat_of(overflow), 0
    while True:
        before = chat.messages
        stream = chat.stream(f"question number {n:4}")
        if stream.overflowed:
            break
        stream.run()
        n += 1

    def fail() -> None:
        raise DecodeFailed("as the test wants it")

    chat.session.context.on_decode = fail
    with pytest.raises(DecodeFailed):
        stream.run()
    chat.session.context.on_decode = lambda: None
    assert chat.messages == before
    assert chat.send("and now?").text == "fine"


def test_a_dump_contains_the_policy_but_needs_its_function() -> None:
    class Model:
        vocab, formatter = ByteVocab(), TagFormatter()

        class info:  # noqa: N801  (the name in models)
            n_ctx_train = 300

        def new_context(self, **sizes: int) -> ScriptedContext:
            return ScriptedContext(says("fine"), **sizes)

    chat = chat_of("shift")
    talk(chat, 3)
    twin = Chat.restore(Model(), chat.dump())
    assert twin.options.overflow == "shift"
    assert any(answer.overflowed for answer in talk(twin, 9))
    data = chat_of(Summarize(lambda dropped: NOTE)).dump()
    with pytest.raises(InvalidOption, match="needs a function"):
        Chat.restore(Model(), data)
    assert Chat.restore(Model(), data, overflow="error").options.overflow == "error"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rolling", r"overflow='rolling' \(accepted: error, truncate_middle, shift, Summarize\(function\)\)"),
        ("summarize", r"pass overflow=Summarize\(function\)"),
    ],
)
def test_unknown_policies_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        ChatOptions(GREEDY, overflow=name)


ROLES = st.lists(
    st.tuples(st.sampled_from([Role.USER, Role.ASSISTANT, Role.TOOL]), st.integers(1, 40)), min_size=0, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(
    talk=ROLES,
    system=st.booleans(),
    room=st.integers(20, 300),
    answer=st.integers(0, 60),
    overflow=st.sampled_from(["truncate_middle", "shift"]),
)
def test_the_remaining_messages_fit_and_are_a_prefix_and_a_suffix(talk, system, room, answer, overflow) -> None:
    messages = [Message(role, "m" * n) for role, n in talk]
    messages = [Message(Role.SYSTEM, "s" * 9)] * system + messages + [Message(Role.USER, "u" * 9)]

    def count(counted: Any) -> int:
        return sum(len(message.content) for message in counted)

    last_turn = max(i for i, message in enumerate(messages) if message.role is Role.USER)
    least = count(messages[:system]) + count(messages[last_turn:])
    try:
        fitted = fit(messages, overflow, count, room, reserved(room, answer))
    except ContextFull:
        assert least > room - 1
        return
    n = len(fitted.dropped)
    if count(messages) + reserved(room, answer) <= room:
        assert n == 0, "all of it fits"
    assert list(fitted.messages) == messages[:system] + messages[system + n :]
    assert list(fitted.dropped) == messages[system : system + n]
    assert count(fitted.messages) <= room
    assert messages[-1] in fitted.messages
    if n and count(fitted.messages) + reserved(room, answer) > room:
        assert len(fitted.messages) == system + len(messages) - last_turn, "more could have been dropped"
    if not n:
        assert count(messages) + reserved(room, answer) <= room or last_turn == system

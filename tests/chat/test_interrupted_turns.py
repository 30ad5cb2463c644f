"""Turns with tools that are dumped, cancelled, paused or edited in the middle, and continue."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chat.tool_chats import FORMATTER, Person, add, call_text, check_cache, new_chat, roles_and_contents
from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Chat, encode_segments
from slm_core.chat.toolbox import Toolbox
from slm_core.chat.tools import open_calls
from slm_core.container import pack, unpack
from slm_core.errors import InvalidSnapshot, SessionError
from slm_core.generation import FinishReason, StoppingAction
from slm_core.types import EditLevel


class Model:
    """The attributes of a model that ``Chat.restore`` needs."""

    info = SimpleNamespace(n_ctx_train=9000)
    vocab, formatter = ByteVocab(), FORMATTER

    def __init__(self, chat: Chat, **options: object) -> None:
        self.script, self.options = chat.session.context.script, options

    def new_context(self, **sizes: int) -> ScriptedContext:
        return ScriptedContext(self.script, **sizes, **self.options)


@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["payload", "replay"])
@pytest.mark.parametrize("n_results", [0, 1, 2])
def test_a_dump_in_the_middle_of_a_turn_continues(n_results: int, payload_format: str) -> None:
    chat = new_chat(call_text("add", a=1) + call_text("add", a=2), "Three and four.")
    stream = chat.stream("go", tools=[add])
    while chat.messages[-1].role.value != "assistant" or not chat.messages[-1].tool_calls:
        next(stream)
    for _ in range(n_results):
        assert next(stream).result is not None
    data = chat.dump()
    twin = Chat.restore(Model(chat, payload_format=payload_format), data, tools=[add])
    assert len(open_calls(twin.messages)) == 2 - n_results
    again = twin.proceed().run()
    whole = stream.run()
    assert again.text == whole.text == "Three and four."
    assert again.tokens == whole.tokens
    assert (twin.messages, twin.options) == (chat.messages, chat.options)
    assert len(again.results) == 2 - n_results


def test_a_dump_contains_the_schemas_of_functions() -> None:
    chat = new_chat("Hi.", call_text("add", a=1))
    chat.send("hello", tools=[add, Person])
    twin = Chat.restore(Model(chat), chat.dump())
    assert twin.options.tools == Toolbox([add, Person]).schemas
    assert twin.session.tokens == chat.session.tokens
    assert [call.name for call in twin.send("go").tool_calls] == ["add"]
    meta, sections = unpack("chat", chat.dump())
    meta["tools"] = [{"type": "function", "function": {"name": 7}}]
    with pytest.raises(InvalidSnapshot, match="tools"):
        Chat.restore(Model(chat), pack("chat", meta, sections))


def test_an_abandoned_turn_ends_where_it_is() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.", "Then not.")
    stream = chat.stream("go", tools=[add])
    for event in stream:
        if event.result is not None:
            break
    chat.edit(0, "went")
    assert stream.answer.finish_reason is FinishReason.CANCELLED
    assert roles_and_contents(chat)[0] == ("user", "went")
    assert len(chat.messages) == 3
    check_cache(chat)


def test_a_turn_cancelled_before_a_call_leaves_the_call_open() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.")
    stream = chat.stream("go", tools=[add])
    while not open_calls(chat.messages):
        next(stream)
    stream.cancel()
    assert list(stream) == []
    assert stream.answer.finish_reason is FinishReason.CANCELLED
    assert [call.name for call in stream.answer.tool_calls] == ["add"]
    stream = chat.proceed()
    stream.cancel()
    assert stream.run().finish_reason is FinishReason.CANCELLED
    assert chat.proceed().run().text == "It is 3."


def test_a_tool_cannot_change_the_chat_that_calls_it() -> None:
    def meddle(text: str) -> str:
        """Meddle.

        Args:
            text: what to say
        """
        assert len(chat.messages) == 2
        assert chat.dump()
        chat.send(text)
        return "sent"

    chat = new_chat(call_text("meddle", text="x"), "I see.")
    answer = chat.send("go", tools=[meddle])
    assert answer.results[0].content.startswith("Error: ChatBusy: a tool of the chat is running")
    assert len(chat.messages) == 4


def test_a_stopping_criterion_can_pause_a_later_round() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.")
    criterion = [lambda event, draft: StoppingAction.PAUSE if draft.text == "It" else StoppingAction.NEXT]
    stream = chat.stream("go", tools=[add], stopping_criteria=criterion)
    list(stream)
    assert (stream.paused, stream.text) == (True, "It")
    assert stream.resume().run().text == "It is 3."


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("change", ["edit", "delete", "regenerate", "forget"])
def test_the_cache_is_right_after_edits_of_a_turn_with_calls(level: EditLevel, change: str) -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.", "So it is.", level=level)
    chat.send("1 + 2?", tools=[add])
    tokens = chat.session.tokens
    actions: dict[str, Callable[[], object]] = {
        "edit": lambda: chat.edit(2, "4"),
        "delete": lambda: chat.delete(-1),
        "regenerate": lambda: chat.regenerate().run(),
        "forget": lambda: chat.forget(-1),
    }
    actions[change]()
    n_tools = len(encode_segments(ByteVocab(), FORMATTER.render([], tools=[add], add_generation_prompt=False)))
    assert chat.session.tokens[:n_tools] == tokens[:n_tools]
    assert chat.session.n_tokens - chat.session.n_pending >= (n_tools if level > EditLevel.REPLAY else 0)
    check_cache(chat)


def test_proceed_without_an_open_question_is_an_error() -> None:
    chat = new_chat("Hi.")
    with pytest.raises(SessionError, match="nothing to answer"):
        chat.proceed()
    chat.send("hello")
    with pytest.raises(SessionError, match="the last message is an answer"):
        chat.proceed()
    chat.delete(-1)
    assert chat.proceed().run().text == "Hi."


def test_a_timeout_covers_all_answers_of_a_turn() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.")
    seconds: list[float] = []
    whole = chat.session.generate

    def generate(*args: Any, **options: Any) -> Any:
        seconds.append(options["timeout"])
        return whole(*args, **options)

    chat.session.generate = generate  # type: ignore[method-assign]
    answer = chat.send("go", tools=[add], timeout=100.0)
    spent = answer.rounds[0].timings
    assert seconds == [100.0, pytest.approx(100.0 - spent.prefill_s - spent.decode_s)]

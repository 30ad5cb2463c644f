"""Callbacks and tools that raise ``StopIteration``, as ``next`` of an empty iterator does, or that call their chat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import slm_core as slm
from chat.tool_chats import FORMATTER, call_text, new_chat, state
from scripted import ByteVocab, ScriptedContext, says
from slm_core.chat import Chat, Session
from slm_core.engine import Engine, EngineOptions
from slm_core.errors import ChatBusy

WAIT_S = 20
CALLBACKS = ["stopping_criteria", "logits_processors", "on_event", "progress"]


def exhausted(*_: object, **__: object) -> Any:
    return next(iter(()))


def options(callback: str) -> dict[str, Any]:
    return {callback: exhausted if callback in ("on_event", "progress") else [exhausted]}


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_stop_iteration_of_a_callback_does_not_end_the_loop_over_events(callback: str) -> None:
    chat = new_chat("Hi.", "Hello.")
    chat.send("Hello?")
    before = state(chat)
    with pytest.raises(RuntimeError, match="a callback raised StopIteration"):
        for _ in chat.stream("Again?", **options(callback)):
            pass
    with pytest.raises(RuntimeError, match="a callback raised StopIteration"):
        asyncio.run(chat.asend("Again?", **options(callback)))
    assert state(chat) == before


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_stop_iteration_of_a_callback_does_not_end_completions(callback: str) -> None:
    with Session(ScriptedContext(n_ctx=1000, n_seq_max=4), ByteVocab()) as session:
        session.append("Hello")
        with pytest.raises(RuntimeError, match="a callback raised StopIteration"):
            for _ in session.completions(2, slm.Sampling(max_tokens=4), **options(callback)):
                pass


@pytest.mark.parametrize("callback", CALLBACKS[:2])
def test_a_stop_iteration_of_a_callback_does_not_end_an_engines_stream(callback: str) -> None:
    context = ScriptedContext(says("Hi."), n_ctx=1000, n_seq_max=4)
    with Engine(context, ByteVocab(), lambda: FORMATTER, EngineOptions()) as engine:
        stream = engine.submit("Hello", **options(callback))
        with pytest.raises(RuntimeError, match="a callback raised StopIteration"):
            for _ in stream:
                pass


def test_a_stop_iteration_of_a_tool_is_told_to_the_model_also_on_an_event_loop() -> None:
    def find(name: str) -> str:
        """Find.

        Args:
            name: whom
        """
        return next(each for each in ("Ada",) if each == name)

    def ask() -> Chat:
        return new_chat(call_text("find", name="Bob"), "There is no Bob.")

    expected = ask().send("Bob?", tools=[find])
    answers: list[slm.Answer] = []
    # An event loop that waits for ever for its worker thread cannot be cancelled.
    loop = threading.Thread(target=lambda: answers.append(asyncio.run(ask().asend("Bob?", tools=[find]))), daemon=True)
    loop.start()
    loop.join(WAIT_S)
    assert [answer.text for answer in answers] == ["There is no Bob."]
    assert [result.content for result in answers[0].results] == [result.content for result in expected.results]


CALLS: list[Callable[[Chat], object]] = [
    lambda chat: chat.fork(),
    lambda chat: chat.send("Me?"),
    lambda chat: chat.delete(0),
    lambda chat: chat.dump(),
    lambda chat: chat.oracle().ask("Me?"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("callback", ["stopping_criteria", "logits_processors"])
def test_a_callback_cannot_change_the_chat_that_calls_it(callback: str, call: Callable[[Chat], object]) -> None:
    chat = new_chat("Hi.", "Hello.", n_seq_max=2)
    chat.send("Hello?")
    before = state(chat)
    with pytest.raises(ChatBusy, match="a callback cannot change the chat that calls it"):
        chat.send("Again?", **{callback: [lambda *_: call(chat)]})
    assert state(chat) == before
    assert chat.send("Again?").text == "Hello."

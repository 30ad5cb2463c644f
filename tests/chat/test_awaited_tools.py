"""Asynchronous tools: which tools run concurrently, and who may use them."""

from __future__ import annotations

import asyncio
import threading

import pytest

import slm_core as slm
from chat.tool_chats import call_text, later, new_chat, state
from slm_core.chat import Chat
from slm_core.chat.tools import open_calls
from slm_core.errors import SessionError


def test_async_tools_of_one_answer_run_concurrently() -> None:
    async def talk() -> slm.Answer:
        both = asyncio.Barrier(2)

        async def meet(n: int) -> int:
            """Meet.

            Args:
                n: who
            """
            await both.wait()  # neither returns before both have begun
            return n

        chat = new_chat(call_text("meet", n=1) + call_text("meet", n=2), "Met.")
        return await asyncio.wait_for(chat.asend("go", tools=[meet]), 20)

    answer = asyncio.run(talk())
    assert [result.content for result in answer.results] == ["1", "2"]
    assert answer.text == "Met."


def test_other_tools_run_in_a_thread_meanwhile() -> None:
    threads = []

    def where(n: int) -> int:
        """Tell.

        Args:
            n: number
        """
        threads.append(threading.current_thread())
        return n

    chat = new_chat(call_text("where", n=1) + call_text("later", a=2), "Done.")
    answer = asyncio.run(chat.asend("go", tools=[where, later]))
    assert [result.content for result in answer.results] == ["1", "4"]
    assert threads[0] is not threading.main_thread()


def test_an_async_tool_is_refused_by_synchronous_calls() -> None:
    chat = new_chat("Hi.", call_text("later", a=1), "Done.")
    chat.send("hello")
    before, decoded = state(chat), chat.session.context.n_decoded
    with pytest.raises(SessionError, match="'later' is to be awaited"):
        chat.send("go", tools=[later])
    assert (state(chat), chat.session.context.n_decoded) == (before, decoded)
    with pytest.raises(SessionError, match="'later' is to be awaited"):
        list(chat.stream("go", tools=[later]))
    assert state(chat) == before


def test_cancelling_a_task_in_a_tool_leaves_the_call_open() -> None:
    async def talk() -> Chat:
        has_begun = asyncio.Event()

        async def wait(n: int) -> int:
            """Wait.

            Args:
                n: number
            """
            has_begun.set()
            await asyncio.Event().wait()
            return n

        chat = new_chat(call_text("wait", n=1), "Hi.")
        task = asyncio.ensure_future(chat.asend("go", tools=[wait]))
        await has_begun.wait()
        with pytest.raises(SessionError, match="a tool of the chat is running"):
            chat.send("x")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return chat

    chat = asyncio.run(talk())
    assert [message.role.value for message in chat.messages] == ["user", "assistant"]
    assert [call.name for call in open_calls(chat.messages)] == ["wait"]
    assert asyncio.run(chat.asend("never mind")).text == "Hi."

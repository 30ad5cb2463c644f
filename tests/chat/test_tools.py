"""Turns with tool calls over a scripted context: the calls that run, their results, and the messages that remain."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest

import slm_core as slm
from chat.tool_chats import (
    GREEDY,
    LOOKUP,
    TEMPLATE,
    Person,
    add,
    call_text,
    check_cache,
    fail,
    later,
    new_chat,
    roles_and_contents,
    state,
)
from slm_core.chat import ChatOptions
from slm_core.chat.toolbox import Toolbox
from slm_core.chat.tools import open_calls
from slm_core.constraints import Choice
from slm_core.errors import ContextFull, InvalidOption, SessionError, ToolError
from slm_core.generation import FinishReason, StoppingAction
from slm_core.types import CallArguments, CallEnd, CallStart, Message, ToolCall

# The loop.


def test_a_call_is_run_and_the_model_answers() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.")
    answer = chat.send("1 + 2?", tools=[add])
    assert (answer.text, answer.finish_reason, answer.tool_calls) == ("It is 3.", FinishReason.STOP, ())
    call = ToolCall("add", {"a": 1}, "call00000")
    assert [(result.call, result.content, result.error) for result in answer.results] == [(call, "3", None)]
    assert [r.finish_reason for r in answer.rounds] == [FinishReason.TOOL_CALLS]
    assert chat.messages == (
        Message("user", "1 + 2?"),
        Message("assistant", "", tool_calls=[call]),
        Message("tool", "3", name="add", tool_call_id="call00000"),
        Message("assistant", "It is 3."),
    )
    check_cache(chat)


def test_tools_stay_with_the_chat() -> None:
    chat = new_chat("Hi.", call_text("add", a=1), "It is 3.")
    chat.send("Hello.", tools=[add])
    assert chat.send("1 + 2?").text == "It is 3."
    assert chat.options.tools == (add,)


def test_the_next_round_decodes_only_new_tokens() -> None:
    chat = new_chat(call_text("add", a=1), "It is 3.")
    answer = chat.send("1 + 2?", tools=[add])
    first, last = answer.rounds[0].usage, answer.usage
    # All tokens except the last token of the first answer, which was sampled, but not decoded.
    assert last.cached_tokens == first.prompt_tokens + first.completion_tokens - 1


def test_parallel_calls_are_run_in_order_and_numbered() -> None:
    called: list[int] = []

    def note(n: int) -> str:
        """Note a number.

        Args:
            n: the number
        """
        called.append(n)
        return f"noted {n}"

    chat = new_chat(call_text("note", n=1) + call_text("note", n=2), call_text("note", n=3), "Done.")
    answer = chat.send("go", tools=[note])
    assert called == [1, 2, 3]
    assert [r.call.id for r in answer.results] == ["call00000", "call00001", "call00002"]
    assert [text for role, text in roles_and_contents(chat) if role == "tool"] == ["noted 1", "noted 2", "noted 3"]
    check_cache(chat)


def test_calls_and_results_are_events() -> None:
    chat = new_chat("Let me see. " + call_text("add", a=1), "It is 3.")
    observed: list[slm.Event] = []
    stream = chat.stream("1 + 2?", tools=[add], on_event=observed.append)
    events = list(stream)
    assert list(map(repr, events)) == list(map(repr, observed))  # nan != nan
    deltas = [delta for event in events for delta in event.calls]
    assert deltas[0] == CallStart(0, "add")
    assert deltas[-1] == CallEnd(0, ToolCall("add", {"a": 1}))
    assert json.loads("".join(d.text for d in deltas if isinstance(d, CallArguments))) == {"a": 1}
    results = [(i, event.result) for i, event in enumerate(events) if event.result is not None]
    assert [result.content for _, result in results] == ["3"]
    place = results[0][0]
    assert "".join(event.text for event in events[:place]) == "Let me see."
    assert "".join(event.text for event in events[place:]) == "It is 3." == stream.answer.text
    assert stream.over


def test_on_event_gets_log_probabilities_without_an_iteration() -> None:
    events: list[slm.Event] = []
    new_chat(call_text("add", a=1), "It is 3.").send("1 + 2?", tools=[add], on_event=events.append)
    tokens = [event for event in events if event.token is not None]
    assert "It is 3." in "".join(event.text for event in tokens)
    assert not any(math.isnan(event.logprob) for event in tokens), "both rounds have log probabilities"


def test_after_max_rounds_calls_are_left_to_the_caller() -> None:
    chat = new_chat(*[call_text("add", a=i) for i in range(3)], "Enough.")
    answer = chat.send("go", tools=[add], max_rounds=2)
    assert (len(answer.rounds), len(answer.results)) == (2, 2)
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert [call.arguments for call in answer.tool_calls] == [{"a": 2}]
    assert open_calls(chat.messages) == tuple(answer.tool_calls)
    assert chat.proceed().run().text == "Enough."
    assert roles_and_contents(chat)[-2:] == [("tool", "4"), ("assistant", "Enough.")]


def test_a_call_of_a_tool_without_a_function_is_left_to_the_caller() -> None:
    chat = new_chat(call_text("add", a=1) + call_text("lookup") + call_text("Person", name="Ada", age=36), "Thanks.")
    answer = chat.send("go", tools=[add, LOOKUP, Person])
    assert [call.name for call in answer.tool_calls] == ["lookup", "Person"]
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert [result.content for result in answer.results] == ["3"]
    with pytest.raises(SessionError, match="'lookup' is the caller's to answer"):
        chat.proceed()
    results = [Message("tool", "ok", name=call.name, tool_call_id=call.id) for call in answer.tool_calls]
    assert chat.send(results).text == "Thanks."
    assert len(chat.messages) == 6
    check_cache(chat)


def test_an_answer_that_is_cut_off_runs_no_calls() -> None:
    chat = new_chat(call_text("add", a=1))
    chat.options = ChatOptions(replace(GREEDY, max_tokens=30), tools=(fail, add))
    answer = chat.send("go")
    assert (answer.finish_reason, answer.results, len(answer.malformed_calls)) == (FinishReason.LENGTH, (), 1)


# Errors.


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (call_text("fail", why="it rains"), "Error: KeyError: 'it rains'"),
        (call_text("sub", a=1), "Error: there is no tool 'sub' (there are: fail, add, Person)"),
        (call_text("add", b=1), "Error: the argument 'a' is missing"),
        (call_text("add", a=1, c=2), "Error: there is no argument 'c' (there are: a, b)"),
        (call_text("add", a="x"), "Error: the argument 'a' is \"x\", not int"),
        (call_text("Person", name="Ada", age=-1), "Error: the argument 'age' does not fit: Input should be"),
    ],
    ids=["raises", "no such tool", "missing", "unknown", "type", "pydantic"],
)
def test_an_error_is_a_result_or_is_raised(call: str, content: str) -> None:
    chat = new_chat(call, "I see.")
    answer = chat.send("go", tools=[fail, add, Person])
    assert answer.text == "I see."
    assert answer.results[0].content.startswith(content)
    assert answer.results[0].error is not None
    assert roles_and_contents(chat)[2] == ("tool", answer.results[0].content)

    chat = new_chat("Hi.", call)
    chat.send("hello")
    before = state(chat)
    with pytest.raises(ToolError) as raised:
        chat.send("go", tools=[fail, add, Person], tool_errors="raise")
    assert raised.value.call.name == answer.results[0].call.name
    assert state(chat) == before


def test_malformed_calls_are_results_or_are_raised() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'
    chat = new_chat(broken, call_text("add", a=1), "It is 3.")
    answer = chat.send("go", tools=[add])
    assert answer.text == "It is 3."
    assert [len(r.malformed_calls) for r in answer.rounds] == [1, 0]
    role, content = roles_and_contents(chat)[2]
    assert role == "user"
    assert content.startswith("Error: a tool call could not be read: ")
    check_cache(chat)

    chat = new_chat("Hi.", broken)
    chat.send("hello")
    before = state(chat)
    with pytest.raises(ToolError, match="malformed"):
        chat.send("go", tools=[add], tool_errors="raise")
    assert state(chat) == before


def test_a_malformed_call_is_reported_with_the_result_of_a_valid_call() -> None:
    chat = new_chat(call_text("add", a=1) + "<tool_call>\n{]\n</tool_call>", "I see.")
    answer = chat.send("go", tools=[add])
    assert [result.content for result in answer.results] == ["3"]
    assert roles_and_contents(chat)[2][1].startswith("3\n\nError: a tool call could not be read: ")


def test_without_functions_malformed_calls_are_left_to_the_caller() -> None:
    chat = new_chat("<tool_call>\n{]\n</tool_call>")
    answer = chat.send("go", tools=[LOOKUP])
    assert (len(answer.malformed_calls), len(chat.messages)) == (1, 2)


@pytest.mark.parametrize("burst", ["criterion", "on_event", "interrupt", "full"])
def test_an_error_in_a_later_round_leaves_the_chat_unchanged(burst: str) -> None:
    long, n_ctx = "x" * 900, 1200 if burst == "full" else 8000
    chat = new_chat("Hi.", call_text("add", a=1), "no more", n_ctx=n_ctx)
    chat.send("hello")
    before = state(chat)

    def criterion(event: slm.Event, draft: slm.Draft) -> StoppingAction:
        if draft.text == "no" and burst == "criterion":
            raise ZeroDivisionError
        return StoppingAction.NEXT

    def on_event(event: slm.Event) -> None:
        if event.result is not None and burst == "on_event":
            raise ZeroDivisionError

    def add(a: int) -> str:
        """Say much.

        Args:
            a: number
        """
        if burst == "interrupt":
            raise KeyboardInterrupt
        return long

    expected = {"interrupt": KeyboardInterrupt, "full": ContextFull}.get(burst, ZeroDivisionError)
    with pytest.raises(expected):
        chat.send("go", tools=[add], stopping_criteria=[criterion], on_event=on_event)
    assert state(chat) == before
    check_cache(chat)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_errors": "ignore"}, "tell, raise"),
        ({"max_rounds": -1}, "0 or more"),
        ({"max_rounds": True}, "0 or more"),
        ({"strict_tools": "yes"}, "True, False"),
        ({"tool_choice": "sub"}, "auto, none, required, add"),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": "none", "constraint": Choice(["a"])}, "both rule the answer"),
        ({"tools": [add, add]}, "different names"),
        ({"tools": [{"type": "function"}]}, "with a name"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_change_nothing(options: dict[str, Any], message: str) -> None:
    chat = new_chat("Hi.")
    chat.send("hello")
    before = state(chat)
    with pytest.raises(InvalidOption, match=message):
        chat.send("go", **{"tools": [add], **options})
    assert state(chat) == before


# Choice.


@pytest.mark.parametrize(("choice", "name"), [("required", "add"), ("later", "later")])
def test_a_call_can_be_forced(choice: str, name: str) -> None:
    chat = new_chat("I would rather talk.", "Well.")
    chat.options = ChatOptions(replace(GREEDY, max_tokens=200), tools=(add, later) if choice == "later" else (add,))
    answer = asyncio.run(chat.asend("go", tool_choice=choice))
    assert [result.call.name for result in answer.results] == [name]
    assert answer.results[0].error is None
    assert answer.text == "Well.", "only the first answer is forced"


def test_calls_can_be_forbidden() -> None:
    free, ruled = (new_chat(call_text("add", a=1), "So.") for _ in range(2))
    for chat in (free, ruled):
        chat.options = ChatOptions(replace(GREEDY, max_tokens=90), tools=(add,))
    assert free.send("go").results
    answer = ruled.send("go", tool_choice="none")
    assert (answer.results, answer.tool_calls, answer.malformed_calls) == ((), (), ())
    assert "<tool_call>" not in answer.text


def test_strict_tools_make_a_begun_call_valid() -> None:
    answers = ['Well, <tool_call>\n{"name": "sub", "arguments": {"a": "x"}}', "So."]
    free, ruled = (new_chat(*answers) for _ in range(2))
    for chat in (free, ruled):
        chat.options = ChatOptions(replace(GREEDY, max_tokens=200), tools=(add,))
    wrong = free.send("go", max_rounds=0)
    assert [call.name for call in wrong.tool_calls] == ["sub"] or wrong.malformed_calls
    answer = ruled.send("go", strict_tools=True, max_rounds=1)
    assert [result.call.name for result in answer.results] == ["add"]
    assert [result.error for result in answer.results] == [None]


def test_a_tool_choice_without_a_grammar_is_refused() -> None:
    chat = new_chat("x", formatter=slm.formatter(template=TEMPLATE, eos_token="<|end|>", parser="pythonic"))
    assert chat.formatter.call_format is None
    with pytest.raises(InvalidOption, match="no grammar of the calls"):
        chat.send("go", tools=[add], tool_choice="required")


@pytest.mark.parametrize(
    ("call", "is_left"),
    [
        (ToolCall("lookup", {}), True),
        (ToolCall("Person", {"name": "Ada", "age": 36}), True),
        (ToolCall("Person", {"name": "Ada", "age": -1}), False),
        (ToolCall("add", {"a": 1}), False),
        (ToolCall("sub", {"a": 1}), False),
    ],
)
def test_valid_calls_without_a_function_are_left(call: ToolCall, is_left: bool) -> None:
    assert Toolbox([add, LOOKUP, Person]).leaves(call) is is_left


def test_a_call_of_an_unknown_tool_is_not_left() -> None:
    chat = new_chat(call_text("sub", a=1) + call_text("lookup"), "I see.")
    answer = chat.send("go", tools=[add, LOOKUP])
    assert [result.content for result in answer.results] == ["Error: there is no tool 'sub' (there are: add, lookup)"]
    assert [call.name for call in answer.tool_calls] == ["lookup"]

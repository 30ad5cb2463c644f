"""Turns in which the model calls tools, over a scripted context: what is run, what the model is told, what stays."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

import slm_core as slm
from scripted import ByteVocab, ScriptedContext, says
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.chat.toolbox import Toolbox
from slm_core.chat.tools import open_calls
from slm_core.constraints import Choice
from slm_core.errors import ContextFull, InvalidOption, InvalidSnapshot, SessionError, ToolError
from slm_core.generation import BrakeAction, FinishReason
from slm_core.sampling import Sampling
from slm_core.snapshot import pack, unpack
from slm_core.types import CallArguments, CallEnd, CallStart, EditLevel, Message, ToolCall

GREEDY = Sampling(temperature=0)
TEMPLATE = """
{%- if tools %}<|start|>system:{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant:{% endif %}"""
FORMATTER = slm.formatter(template=TEMPLATE, eos_token="<|end|>")


def written(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(why: str) -> str:
    """Fail.

    Args:
        why: the reason
    """
    raise KeyError(why)


async def later(a: int) -> int:
    """Double a number, later.

    Args:
        a: the number
    """
    await asyncio.sleep(0)
    return 2 * a


class Person(BaseModel):
    """Note a person."""

    name: str
    age: int = Field(ge=0)


LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


def new_chat(*answers: str, formatter: Any = FORMATTER, **options: Any) -> Chat:
    context = ScriptedContext(says(*answers), n_ctx=options.pop("n_ctx", 8000), n_batch=512, **options)
    return Chat(Session(context, ByteVocab(), sampling=GREEDY, owns_context=True), formatter)


def spoken(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role.value, message.content) for message in chat.messages]


def state(chat: Chat) -> tuple[object, ...]:
    return chat.messages, chat.options, chat.session.tokens


def check_cache(chat: Chat) -> None:
    """The next logits are those of a new session that is given the messages at once."""
    schemas = Toolbox(chat.options.tools).schemas
    ids = encode_segments(ByteVocab(), FORMATTER.render(chat.messages, tools=schemas))
    fresh = Session(ScriptedContext(chat.session.context.script, n_ctx=9000), ByteVocab())
    fresh.append_tokens(ids)
    chat.session.follow(ids)
    np.testing.assert_array_equal(chat.session.next_logits(), fresh.next_logits())


# The loop.


def test_a_call_is_run_and_the_model_answers() -> None:
    chat = new_chat(written("add", a=1), "It is 3.")
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
    chat = new_chat("Hi.", written("add", a=1), "It is 3.")
    chat.send("Hello.", tools=[add])
    assert chat.send("1 + 2?").text == "It is 3."
    assert chat.options.tools == (add,)


def test_the_next_round_decodes_only_what_is_new() -> None:
    chat = new_chat(written("add", a=1), "It is 3.")
    answer = chat.send("1 + 2?", tools=[add])
    first, last = answer.rounds[0].usage, answer.usage
    # All but the token that ended the first answer, which was chosen and not decoded.
    assert last.cached_tokens == first.prompt_tokens + first.completion_tokens - 1


def test_parallel_calls_are_run_in_order_and_numbered() -> None:
    seen: list[int] = []

    def note(n: int) -> str:
        """Note a number.

        Args:
            n: the number
        """
        seen.append(n)
        return f"noted {n}"

    chat = new_chat(written("note", n=1) + written("note", n=2), written("note", n=3), "Done.")
    answer = chat.send("go", tools=[note])
    assert seen == [1, 2, 3]
    assert [r.call.id for r in answer.results] == ["call00000", "call00001", "call00002"]
    assert [text for role, text in spoken(chat) if role == "tool"] == ["noted 1", "noted 2", "noted 3"]
    check_cache(chat)


def test_calls_and_results_are_events() -> None:
    chat = new_chat("Let me see. " + written("add", a=1), "It is 3.")
    seen: list[slm.Event] = []
    stream = chat.stream("1 + 2?", tools=[add], on_event=seen.append)
    events = list(stream)
    assert list(map(repr, events)) == list(map(repr, seen))  # nan is not itself
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


def test_on_event_is_told_of_log_probabilities_where_nobody_iterates() -> None:
    seen: list[slm.Event] = []
    new_chat(written("add", a=1), "It is 3.").send("1 + 2?", tools=[add], on_event=seen.append)
    tokens = [event for event in seen if event.token is not None]
    assert "It is 3." in "".join(event.text for event in tokens)
    assert not any(math.isnan(event.logprob) for event in tokens), "in both rounds"


def test_after_so_many_rounds_calls_are_left_to_the_caller() -> None:
    chat = new_chat(*[written("add", a=i) for i in range(3)], "Enough.")
    answer = chat.send("go", tools=[add], max_rounds=2)
    assert (len(answer.rounds), len(answer.results)) == (2, 2)
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert [call.arguments for call in answer.tool_calls] == [{"a": 2}]
    assert open_calls(chat.messages) == tuple(answer.tool_calls)
    assert chat.proceed().run().text == "Enough."
    assert spoken(chat)[-2:] == [("tool", "4"), ("assistant", "Enough.")]


def test_a_call_of_a_tool_that_is_only_described_is_left_to_the_caller() -> None:
    chat = new_chat(written("add", a=1) + written("lookup") + written("Person", name="Ada", age=36), "Thanks.")
    answer = chat.send("go", tools=[add, LOOKUP, Person])
    assert [call.name for call in answer.tool_calls] == ["lookup", "Person"]
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert [result.content for result in answer.results] == ["3"]
    with pytest.raises(SessionError, match="'lookup' is the caller's to answer"):
        chat.proceed()
    told = [Message("tool", "ok", name=call.name, tool_call_id=call.id) for call in answer.tool_calls]
    assert chat.send(told).text == "Thanks."
    assert len(chat.messages) == 6
    check_cache(chat)


def test_an_answer_that_is_cut_off_runs_nothing() -> None:
    chat = new_chat(written("add", a=1))
    chat.options = ChatOptions(replace(GREEDY, max_tokens=30), tools=(fail, add))
    answer = chat.send("go")
    assert (answer.finish_reason, answer.results, len(answer.malformed_calls)) == (FinishReason.LENGTH, (), 1)


# What goes wrong.


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (written("fail", why="it rains"), "Error: KeyError: 'it rains'"),
        (written("sub", a=1), "Error: there is no tool 'sub' (there are: fail, add, Person)"),
        (written("add", b=1), "Error: the argument 'a' is missing"),
        (written("add", a=1, c=2), "Error: there is no argument 'c' (there are: a, b)"),
        (written("add", a="x"), "Error: the argument 'a' is \"x\", not int"),
        (written("Person", name="Ada", age=-1), "Error: the argument 'age' does not fit: Input should be"),
    ],
    ids=["raises", "no such tool", "missing", "unknown", "type", "pydantic"],
)
def test_the_model_is_told_of_an_error_or_it_is_raised(call: str, told: str) -> None:
    chat = new_chat(call, "I see.")
    answer = chat.send("go", tools=[fail, add, Person])
    assert answer.text == "I see."
    assert answer.results[0].content.startswith(told)
    assert answer.results[0].error is not None
    assert spoken(chat)[2] == ("tool", answer.results[0].content)

    chat = new_chat("Hi.", call)
    chat.send("hello")
    before = state(chat)
    with pytest.raises(ToolError) as raised:
        chat.send("go", tools=[fail, add, Person], tool_errors="raise")
    assert raised.value.call.name == answer.results[0].call.name
    assert state(chat) == before


def test_the_model_is_told_of_malformed_calls_or_they_are_raised() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'
    chat = new_chat(broken, written("add", a=1), "It is 3.")
    answer = chat.send("go", tools=[add])
    assert answer.text == "It is 3."
    assert [len(r.malformed_calls) for r in answer.rounds] == [1, 0]
    role, content = spoken(chat)[2]
    assert role == "user"
    assert content.startswith("Error: a tool call could not be read: ")
    check_cache(chat)

    chat = new_chat("Hi.", broken)
    chat.send("hello")
    before = state(chat)
    with pytest.raises(ToolError, match="malformed"):
        chat.send("go", tools=[add], tool_errors="raise")
    assert state(chat) == before


def test_of_a_malformed_call_beside_a_sound_one_the_model_is_told_with_the_result() -> None:
    chat = new_chat(written("add", a=1) + "<tool_call>\n{]\n</tool_call>", "I see.")
    answer = chat.send("go", tools=[add])
    assert [result.content for result in answer.results] == ["3"]
    assert spoken(chat)[2][1].startswith("3\n\nError: a tool call could not be read: ")


def test_without_functions_malformed_calls_are_the_callers() -> None:
    chat = new_chat("<tool_call>\n{]\n</tool_call>")
    answer = chat.send("go", tools=[LOOKUP])
    assert (len(answer.malformed_calls), len(chat.messages)) == (1, 2)


@pytest.mark.parametrize("burst", ["brake", "on_event", "interrupt", "full"])
def test_whatever_raises_in_a_later_round_the_chat_is_as_it_was(burst: str) -> None:
    long, n_ctx = "x" * 900, 1200 if burst == "full" else 8000
    chat = new_chat("Hi.", written("add", a=1), "no more", n_ctx=n_ctx)
    chat.send("hello")
    before = state(chat)

    def brake(event: slm.Event, draft: slm.Draft) -> BrakeAction:
        if draft.text == "no" and burst == "brake":
            raise ZeroDivisionError
        return BrakeAction.NEXT

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
        chat.send("go", tools=[add], brakes=[brake], on_event=on_event)
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


def test_calls_can_be_ruled_out() -> None:
    free, ruled = (new_chat(written("add", a=1), "So.") for _ in range(2))
    for chat in (free, ruled):
        chat.options = ChatOptions(replace(GREEDY, max_tokens=90), tools=(add,))
    assert free.send("go").results
    answer = ruled.send("go", tool_choice="none")
    assert (answer.results, answer.tool_calls, answer.malformed_calls) == ((), (), ())
    assert "<tool_call>" not in answer.text


def test_strict_tools_make_a_call_valid_that_was_begun() -> None:
    answers = ['Well, <tool_call>\n{"name": "sub", "arguments": {"a": "x"}}', "So."]
    free, ruled = (new_chat(*answers) for _ in range(2))
    for chat in (free, ruled):
        chat.options = ChatOptions(replace(GREEDY, max_tokens=200), tools=(add,))
    wrong = free.send("go", max_rounds=0)
    assert [call.name for call in wrong.tool_calls] == ["sub"] or wrong.malformed_calls
    answer = ruled.send("go", strict_tools=True, max_rounds=1)
    assert [result.call.name for result in answer.results] == ["add"]
    assert [result.error for result in answer.results] == [None]


def test_a_choice_that_no_grammar_enforces_is_refused() -> None:
    chat = new_chat("x", formatter=slm.formatter(template=TEMPLATE, eos_token="<|end|>", parser="pythonic"))
    assert chat.formatter.call_format is None
    with pytest.raises(InvalidOption, match="no grammar of the calls"):
        chat.send("go", tools=[add], tool_choice="required")


# Awaiting.


def test_awaited_tools_of_one_answer_run_side_by_side() -> None:
    async def talk() -> slm.Answer:
        both = asyncio.Barrier(2)

        async def meet(n: int) -> int:
            """Meet.

            Args:
                n: who
            """
            await both.wait()  # neither returns before both have begun
            return n

        chat = new_chat(written("meet", n=1) + written("meet", n=2), "Met.")
        return await asyncio.wait_for(chat.asend("go", tools=[meet]), 20)

    answer = asyncio.run(talk())
    assert [result.content for result in answer.results] == ["1", "2"]
    assert answer.text == "Met."


def test_other_tools_run_in_a_thread_beside_them() -> None:
    threads = []

    def where(n: int) -> int:
        """Tell.

        Args:
            n: number
        """
        threads.append(threading.current_thread())
        return n

    chat = new_chat(written("where", n=1) + written("later", a=2), "Done.")
    answer = asyncio.run(chat.asend("go", tools=[where, later]))
    assert [result.content for result in answer.results] == ["1", "4"]
    assert threads[0] is not threading.main_thread()


def test_an_awaited_tool_is_refused_where_nobody_awaits() -> None:
    chat = new_chat("Hi.", written("later", a=1), "Done.")
    chat.send("hello")
    before, decoded = state(chat), chat.session.context.n_decoded
    with pytest.raises(SessionError, match="'later' is to be awaited"):
        chat.send("go", tools=[later])
    assert (state(chat), chat.session.context.n_decoded) == (before, decoded)
    with pytest.raises(SessionError, match="'later' is to be awaited"):
        list(chat.stream("go", tools=[later]))
    assert state(chat) == before


def test_a_task_that_is_cancelled_in_a_tool_leaves_the_call_open() -> None:
    async def talk() -> Chat:
        begun = asyncio.Event()

        async def wait(n: int) -> int:
            """Wait.

            Args:
                n: number
            """
            begun.set()
            await asyncio.Event().wait()
            return n

        chat = new_chat(written("wait", n=1), "Hi.")
        task = asyncio.ensure_future(chat.asend("go", tools=[wait]))
        await begun.wait()
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


# In the middle.


class Model:
    """What ``Chat.restore`` needs."""

    info = SimpleNamespace(n_ctx_train=9000)
    vocab, formatter = ByteVocab(), FORMATTER

    def __init__(self, chat: Chat, **options: object) -> None:
        self.script, self.options = chat.session.context.script, options

    def new_context(self, *, n_ctx: int, n_seq_max: int, n_batch: int) -> ScriptedContext:
        return ScriptedContext(self.script, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, **self.options)


@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["payload", "replay"])
@pytest.mark.parametrize("n_results", [0, 1, 2])
def test_a_dump_in_the_middle_of_a_turn_goes_on(n_results: int, payload_format: str) -> None:
    chat = new_chat(written("add", a=1) + written("add", a=2), "Three and four.")
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


def test_a_dump_has_the_schemas_of_functions() -> None:
    chat = new_chat("Hi.", written("add", a=1))
    chat.send("hello", tools=[add, Person])
    twin = Chat.restore(Model(chat), chat.dump())
    assert twin.options.tools == Toolbox([add, Person]).schemas
    assert twin.session.tokens == chat.session.tokens
    assert [call.name for call in twin.send("go").tool_calls] == ["add"]
    meta, sections = unpack("chat", chat.dump())
    meta["tools"] = [{"type": "function", "function": {"name": 7}}]
    with pytest.raises(InvalidSnapshot, match="tools"):
        Chat.restore(Model(chat), pack("chat", meta, sections))


def test_a_turn_that_nobody_iterates_ends_where_it_is() -> None:
    chat = new_chat(written("add", a=1), "It is 3.", "Then not.")
    stream = chat.stream("go", tools=[add])
    for event in stream:
        if event.result is not None:
            break
    chat.edit(0, "went")
    assert stream.answer.finish_reason is FinishReason.CANCELLED
    assert spoken(chat)[0] == ("user", "went")
    assert len(chat.messages) == 3
    check_cache(chat)


def test_a_turn_that_is_cancelled_before_a_call_is_run_leaves_it_open() -> None:
    chat = new_chat(written("add", a=1), "It is 3.")
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

    chat = new_chat(written("meddle", text="x"), "I see.")
    answer = chat.send("go", tools=[meddle])
    assert answer.results[0].content.startswith("Error: SessionError: a tool of the chat is running")
    assert len(chat.messages) == 4


def test_a_brake_can_pause_a_later_round() -> None:
    chat = new_chat(written("add", a=1), "It is 3.")
    brake = [lambda event, draft: BrakeAction.PAUSE if draft.text == "It" else BrakeAction.NEXT]
    stream = chat.stream("go", tools=[add], brakes=brake)
    list(stream)
    assert (stream.paused, stream.said) == (True, "It")
    assert stream.resume().run().text == "It is 3."


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("change", ["edit", "delete", "regenerate", "forget"])
def test_edits_of_a_turn_with_calls_keep_the_cache_right(level: EditLevel, change: str) -> None:
    chat = new_chat(written("add", a=1), "It is 3.", "So it is.", level=level)
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


def test_asked_for_nothing_it_says_so() -> None:
    chat = new_chat("Hi.")
    with pytest.raises(SessionError, match="nothing to answer"):
        chat.proceed()
    chat.send("hello")
    with pytest.raises(SessionError, match="the last message is an answer"):
        chat.proceed()
    chat.delete(-1)
    assert chat.proceed().run().text == "Hi."


def test_a_timeout_is_for_all_answers() -> None:
    chat = new_chat(written("add", a=1), "It is 3.")
    seconds: list[float] = []
    whole = chat.session.generate

    def generate(*args: Any, **options: Any) -> Any:
        seconds.append(options["timeout"])
        return whole(*args, **options)

    chat.session.generate = generate  # type: ignore[method-assign]
    answer = chat.send("go", tools=[add], timeout=100.0)
    spent = answer.rounds[0].timings
    assert seconds == [100.0, pytest.approx(100.0 - spent.prefill_s - spent.decode_s)]

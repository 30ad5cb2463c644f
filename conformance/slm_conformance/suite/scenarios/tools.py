"""Tools of a chat: a called function runs, and the model answers to its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.chats import LOOK, BenchModel, n_shared_tokens
from slm_conformance.suite.scenarios.sessions import fresh_row, next_row
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.chat.tools import ToolUse
from slm_core.constraints import Regex
from slm_core.errors import InvalidOption, SessionError, ToolError
from slm_core.formatting import formatter
from slm_core.generation import Answer, Draft, Event, FinishReason, StoppingAction
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.types import CallStart, EditLevel, Message, Role

TEMPLATE = """
{%- for tool in tools or [] %}<|im_start|>system
{{ tool.function.name }}<|im_end|>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A short chat format, for slow contexts."""
GREEDY = Sampling(temperature=0, max_tokens=300)


class TestTools(Scenarios):
    """Chat: the loop of tool calls, results and answers; a grammar forces the call."""

    above_contract = True

    def test_a_call_is_run(self, bench: Bench) -> None:
        """Chat: a called function runs, its result becomes a message, and the model answers to it."""
        picked: list[str] = []

        def pick(colour: Literal["red", "blue"]) -> str:
            """Pick a colour.

            Args:
                colour: which
            """
            picked.append(colour)
            return f"you have {colour}"

        session = Session(bench.context(n_ctx=384), bench.vocab)
        with Chat(session, formatter(TEMPLATE, model=bench.model), options=_options(bench)) as chat:
            answer = chat.send("which", tools=[pick], tool_choice="pick", max_rounds=1)
            messages = [(message.role, message.content) for message in chat.messages]
            assert len(picked) == 1, f"a model that must call a tool once says {chat.messages[1]}"
            expected = [(Role.TOOL, f"you have {colour}") for colour in picked]
            assert messages[2:-1] == expected, f"after its call, what the model was told is {messages[2:-1]}"
            assert messages[-1] == (Role.ASSISTANT, answer.text), "the last message is not the answer"
            rendered = encode_segments(bench.vocab, chat.formatter.render(chat.messages[:-1], tools=[pick]))
            prompt = session.tokens[: answer.usage.prompt_tokens]
            assert list(prompt) == rendered, "the answer was not made from the messages, the result among them"
            bench.agree(next_row(session), fresh_row(bench, session), "the next logits after an answer to a result")

    def test_several_rounds(self, bench: Bench) -> None:
        """Chat: calls run in order; the model reads results and errors; remaining calls wait, also in a dump.

        The answers are scripted. After each, only the messages that are new are decoded.
        """
        broken = "<tool_call>\n{]\n</tool_call>"
        first = _call("_add", a=1, pair=[2, 3], rest=[4]) + _call("_fail") + broken
        whole, half = _call("_add", a=5.0, b=-1), _call("_add", a=2.5)
        says = Says(bench.vocab, first, whole, _call("look"), "so", broken, half, broken)

        dumps: list[bytes] = []

        def _fail() -> str:
            """Copy the chat that calls."""
            dumps.append(chat.dump())
            chat.fork()
            return "done"

        model, tools = BenchModel(bench), (_add, _fail, LOOK)
        model.formatter = formatter(TEMPLATE, model=bench.model)
        session = Session(bench.context(n_ctx=1024, n_seq_max=1), bench.vocab, sampling=GREEDY)
        seen: list[Event] = []
        with Chat(session, model.formatter, options=ChatOptions(GREEDY, tools)) as chat:
            answer = chat.send("x", sampler=says, on_event=seen.append, max_rounds=1)
            assert len(dumps) == 1, "a tool cannot dump the chat that calls it"
            _check_results(chat, answer, seen)
            _check_second_prompt(bench, chat, answer)
            data = chat.dump()
        with Chat.restore(model, data, tools=tools) as chat:
            _check_remaining_call(bench, chat, says)
            unchanged = (chat.messages, chat.session.tokens)
            _check_refused_turns(bench, chat, says)
            assert (chat.messages, chat.session.tokens) == unchanged, "a refused call or option changed the chat"
            ToolUse(max_rounds=0)  # is accepted
            answer = chat.send("x", sampler=says, tools=[LOOK])
            assert len(answer.malformed_calls) == 1, f"a call that could not be read is {answer}"
            assert chat.messages[-1].role is Role.ASSISTANT, "a broken call is complained of, and no tool is run here"

    def test_tools_after_a_failure(self, bench: Bench) -> None:
        """Chat: after an answer that raised, its new tools are gone, and earlier tools stay."""
        before = (_tool("look"),)
        session = Session(bench.context(n_ctx=384), bench.vocab)
        options = replace(_options(bench), tools=before)
        with Chat(session, formatter(TEMPLATE, model=bench.model), options=options) as chat:
            for tools in ((_tool("turn"),), ()):
                with pytest.raises(KeyError):
                    chat.send("which", tools=tools, stopping_criteria=[_raise])
                assert chat.options.tools == before, f"after an answer that raised, the tools are {chat.options.tools}"
            answer = chat.send("which")
            rendered = encode_segments(bench.vocab, chat.formatter.render(chat.messages[:-1], tools=before))
            assert list(session.tokens[: answer.usage.prompt_tokens]) == rendered, "the next prompt has other tools"


class Says:
    """A sampler that says texts, one for each answer, whatever the logits are.

    Args:
        vocab: the vocabulary.
        texts: the answers.
    """

    def __init__(self, vocab: Vocab, *texts: str) -> None:
        end = max(vocab.eog_ids)
        self._answers = [[*vocab.encode(text, add_special=False, parse_special=False), end] for text in texts]
        self._remaining: list[int] = []

    def set_history(self, tokens: Sequence[int]) -> None:
        """Begin the next answer."""
        self._remaining = self._answers.pop(0)

    def sample(self, logits: Rows) -> int:
        """The next token of the answer."""
        return self._remaining[0]

    def accept(self, token: int) -> None:
        """Continue after a token of the answer."""
        assert self._remaining.pop(0) == token, "another token was accepted than was sampled"

    def reset(self) -> None:
        """Nothing to reset."""

    def clone(self) -> Self:
        """The sampler itself: answers of chats are not copied."""
        return self

    def state(self) -> bytes:
        """No state."""
        return b""

    def set_state(self, state: bytes) -> None:
        """Nothing to restore."""


def _add(a: int, b: float = 2.5, pair: tuple[int, int] = (0, 0), rest: list = []) -> object:  # type: ignore[type-arg]  # noqa: B006
    """Add two numbers.

    Args:
        a: the first
        b: the second
        pair: more
        rest: still more
    """
    assert [type(value) for value in (a, b, pair, rest)] == [int, float, tuple, list], "a value of another type"
    return a + b, pair, rest


def _call(name: str, /, **arguments: object) -> str:
    """The text of a call, as the template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _rendered(bench: Bench, chat: Chat, messages: Sequence[Message]) -> list[int]:
    """The tokens of the prompt of an answer to messages."""
    return encode_segments(bench.vocab, chat.formatter.render(messages, tools=chat.options.tools))


def _tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def _raise(event: Event, draft: Draft) -> StoppingAction:
    raise KeyError("a stopping criterion's own error")


def _options(bench: Bench) -> ChatOptions:
    """Greedy, without white space: a random model would fill its answer with it."""
    blank = [i for i in range(bench.vocab.size) if (data := bench.vocab.token_bytes(i)) and not data.strip()]
    return ChatOptions(Sampling(temperature=0, max_tokens=64, logit_bias=dict.fromkeys(blank, -1000.0)))


def _check_results(chat: Chat, answer: Answer, events: Sequence[Event]) -> None:
    """Check the results and calls of two rounds; the last call has not run."""
    results = [event.result.content for event in events if event.result is not None]
    contents = [message.content for message in chat.messages if message.role is Role.TOOL]
    assert contents[0] == "[3.5, [2, 3], [4]]", f"the model reads the results {contents}"
    assert contents[1].startswith("Error: ChatBusy: "), f"a tool that uses its chat gives {contents[1]!r}"
    assert "\n\nError: a tool call could not be read" in contents[1], f"a broken call is not an error: {contents}"
    assert results == [result.content for result in answer.results], f"the results of events are {results}"
    begun = [delta.name for event in events for delta in event.calls if isinstance(delta, CallStart)]
    assert begun == ["_add", "_fail", "_add"], f"the calls that events begin are {begun}"
    assert isinstance(answer.rounds, tuple), f"rounds of an answer, which is immutable: {answer.rounds!r}"
    assert isinstance(answer.results, tuple), f"results of an answer, which is immutable: {answer.results!r}"
    calls = (*answer.rounds[0].tool_calls, *answer.tool_calls)
    assert len({call.id for call in calls}) == len(calls) == 3, f"the calls have the ids of others: {calls}"
    ids = [message.tool_call_id for message in chat.messages if message.role is Role.TOOL]
    assert ids == [call.id for call in calls[:2]], "results have the ids of other calls"
    assert answer.finish_reason is FinishReason.TOOL_CALLS, "a call is left, and the answer does not say so"


def _check_second_prompt(bench: Bench, chat: Chat, answer: Answer) -> None:
    """Check that the second prompt has the new messages, and that the tokens it shares are not decoded again."""
    first, tokens = answer.rounds[0], chat.session.tokens
    before = (*tokens[: first.usage.prompt_tokens], *first.tokens)
    prompt = _rendered(bench, chat, chat.messages[:-1])
    assert list(tokens[: answer.usage.prompt_tokens]) == prompt, "the second prompt has other messages"
    n_shared = n_shared_tokens(before[:-1], prompt)
    if n_shared == len(before) - 1 or bench.edit_level >= EditLevel.TRUNCATE:
        n_cached = answer.usage.cached_tokens
        assert n_cached == n_shared, f"{n_shared} tokens of the second prompt were held, {n_cached} were used"


def _check_remaining_call(bench: Bench, chat: Chat, says: Says) -> None:
    """Check that a restored chat runs the remaining call, leaves a call to the caller, and takes its result."""
    stream = chat.proceed(sampler=says)
    with bench.refused("an answer before its tools have run", SessionError, context=chat.session.context):
        _ = stream.answer
    answer = stream.run()
    results = [result.content for result in answer.results]
    assert results == ["[4.0, [0, 0], []]"], f"the call that was left gives {answer}"
    assert [call.name for call in answer.tool_calls] == ["look"], f"the caller's calls are {answer.tool_calls}"
    with bench.refused("a call that the caller answers", SessionError, context=chat.session.context):
        chat.proceed(sampler=says)
    result = Message(Role.TOOL, "ok", name="look", tool_call_id=answer.tool_calls[0].id)
    assert chat.send(result, sampler=says).text.strip() == "so", "the answer to the caller's result is another"
    prompt = _rendered(bench, chat, chat.messages[:-1])
    assert list(chat.session.tokens[: len(prompt)]) == prompt, "the last prompt has other messages"


def _check_refused_turns(bench: Bench, chat: Chat, says: Says) -> None:
    """Check that a call that cannot be read raises with ``tool_errors="raise"``, and that wrong options raise."""
    with bench.refused("a call that could not be read", ToolError):
        chat.send("x", sampler=says, tool_errors="raise")
    with bench.refused("the argument 2.5 for an int", ToolError):
        chat.send("x", sampler=says, tool_errors="raise")
    wrong_options: tuple[dict[str, Any], ...] = (
        {"max_rounds": -1},
        {"max_rounds": True},
        {"max_rounds": 0.5},
        {"strict_tools": 1},
        {"tool_errors": "ignore"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "nobody"},
        {"tool_choice": ""},
        {"tool_choice": "auto "},
        {"tools": [LOOK, LOOK]},
        {"sampler": says, "logits_processors": [lambda tokens, row: row]},
        {"constraint": Regex("a"), "tool_choice": "look"},
    )
    for wrong in wrong_options:
        with bench.refused(f"a turn with {wrong}", InvalidOption, context=chat.session.context):
            chat.send("x", **wrong)

"""``Answer.to_openai``: the client's types accept it, and the server answers the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

import slm_core as slm
from server.conftest import Body, Client
from slm_core.generation import FinishReason, TokenLogprob
from slm_core.generation.events import Timings, Usage
from slm_core.types import MalformedCall

chat_types = pytest.importorskip("openai.types.chat", reason="the client whose types are the oracle")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUM, CITY = "What is 12 + 30?", "What is the weather in Rome?"


def same_answer(written: Body) -> Body:
    """What does not differ from one answer to another, with arguments of calls decoded."""
    (choice,) = written["choices"]
    calls = [call["function"] for call in choice["message"].pop("tool_calls", None) or ()]
    choice["calls"] = [(call["name"], json.loads(call["arguments"])) for call in calls]
    usage = {name: written["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"object": written["object"], "model": written["model"], "choice": choice, "usage": usage}


def logprobs_of(written: Body) -> list[tuple[str, float]]:
    logprobs = written["choices"][0].pop("logprobs")
    return [] if logprobs is None else [(each["token"], each["logprob"]) for each in logprobs["content"]]


@pytest.mark.parametrize(
    ("question", "fields", "options"),
    [
        (SUM, {}, {}),
        (SUM, {"max_tokens": 3}, {"max_tokens": 3}),
        (SUM, {"chat_template_kwargs": {"enable_thinking": True}}, {"thinking": True}),
        (SUM, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        (CITY, {"tools": [WEATHER]}, {"tools": [WEATHER]}),
    ],
    ids=["stop", "length", "reasoning", "logprobs", "calls"],
)
def test_an_answer_is_what_the_server_writes(
    client: Client, demo: slm.Model, question: str, fields: Body, options: dict[str, Any]
) -> None:
    served = client.chat(messages=[{"role": "user", "content": question}], **fields)
    names = ("max_tokens", "logprobs")
    sampling = slm.Sampling(temperature=0, **{name: options[name] for name in names if name in options})
    others = {name: value for name, value in options.items() if name not in names}
    with demo.chat(n_ctx=512, sampling=sampling, **others) as chat:
        answer = chat.send(question)
    written = answer.to_openai("demo")
    message = written["choices"][0]["message"]
    assert (message["content"] or "", message.get("reasoning_content")) == (answer.text, answer.reasoning)
    assert bool(answer.reasoning) == ("thinking" in options), "the model reasons if it is asked to"
    chat_types.ChatCompletion.model_validate(json.loads(json.dumps(written)), strict=True)
    assert set(served) - set(written) == {"system_fingerprint"}
    assert set(written) <= set(served)
    (tokens, served_tokens) = logprobs_of(written), logprobs_of(served)
    assert bool(tokens) == ("logprobs" in options)
    assert [token for token, _ in tokens] == [token for token, _ in served_tokens]
    for (_, logprob), (_, other) in zip(tokens, served_tokens, strict=True):
        assert logprob == pytest.approx(other, abs=1e-2), "another batch: equal within clause 9"
    assert same_answer(written) == same_answer(served)


def test_the_server_reads_the_messages_of_a_chat(client: Client, demo: slm.Model) -> None:
    """A conversation with a call and its result continues on the server as in the chat."""
    with demo.chat(n_ctx=512, sampling=slm.Sampling(temperature=0), tools=[WEATHER]) as chat:
        (call,) = chat.send(CITY).tool_calls
        result = slm.Message("tool", "It is sunny in Rome.", name=call.name, tool_call_id=call.id)
        conversation = [message.to_openai() for message in (*chat.messages, result)]
        expected = chat.send(result).to_openai("demo")
    served = client.chat(messages=conversation, tools=[WEATHER])
    assert same_answer(expected) == same_answer(served)


def test_every_finish_reason_has_a_name_in_the_clients_types() -> None:
    call = slm.ToolCall("now", {})
    names = {}
    for reason in FinishReason:
        answer = slm.Answer("x", reason, (1,), Usage(1, 0, 1), Timings(0.0, 0.0))
        for calls in ((), (call,)):
            written = replace(answer, tool_calls=calls).to_openai()
            names[reason.value, len(calls)] = (
                chat_types.ChatCompletion.model_validate(written, strict=True).choices[0].finish_reason
            )
    assert names == {
        ("stop", 0): "stop",
        ("stop", 1): "tool_calls",
        ("constraint", 0): "stop",
        ("constraint", 1): "tool_calls",
        ("tool_calls", 0): "tool_calls",
        ("tool_calls", 1): "tool_calls",
        ("length", 0): "length",
        ("length", 1): "length",
        ("cancelled", 0): "length",
        ("cancelled", 1): "length",
    }


def test_answers_without_an_openai_equivalent() -> None:
    answer = slm.Answer(
        "So: ",
        FinishReason.STOP,
        (1, 2),
        Usage(5, 3, 2),
        Timings(0.0, 0.0),
        malformed_calls=[MalformedCall("<tool_call>{", "not JSON")],
        logprobs=[
            TokenLogprob(1, "é", -0.5, ((1, "é", -0.5), (3, "\N{REPLACEMENT CHARACTER}", -math.inf))),
            TokenLogprob(2, "", 0.0, ()),
        ],
    )
    read = chat_types.ChatCompletion.model_validate(json.loads(json.dumps(answer.to_openai())), strict=True)
    (choice,) = read.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "So: <tool_call>{")
    first, second = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("é", list("é".encode()), -0.5)
    assert (first.top_logprobs[1].bytes, first.top_logprobs[1].logprob) == (None, -9999.0)
    assert (second.token, second.bytes, second.top_logprobs) == ("", [], [])
    assert (read.usage.total_tokens, read.usage.prompt_tokens_details.cached_tokens) == (7, 3)


def test_answers_and_calls_have_ids_of_their_own() -> None:
    call = slm.ToolCall("now", {})
    answer = slm.Answer("", FinishReason.STOP, (), Usage(1, 0, 0), Timings(0.0, 0.0), tool_calls=[call, call])
    written: list[Any] = [answer.to_openai() for _ in range(2)]
    calls = [each["id"] for one in written for each in one["choices"][0]["message"]["tool_calls"]]
    assert len({one["id"] for one in written}) == 2
    assert len(set(calls)) == 4 and all(len(each) == 9 and each.isalnum() for each in calls)

"""POST /v1/messages: Anthropic's own client reads the answers, and validates their form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import anthropic
import httpx2
import pytest

import slm_core as slm
from server.conftest import Body, Client, frames
from server.test_openai_chat import PERSON
from slm_core.server.anthropic_fields import CountRequest

T = TypeVar("T")
TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SUM: Body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 100, "temperature": 0}
WEATHER: Body = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [TOOL],
    "max_tokens": 100,
    "temperature": 0,
}
CASES: dict[str, Body] = {
    "text": SUM,
    "cut": {**SUM, "max_tokens": 3},
    "stopped": {**SUM, "stop_sequences": ["2", "4"]},
    "system": {**SUM, "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]},
    "reasoning": {**SUM, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 300},
    "no reasoning": {**SUM, "thinking": {"type": "disabled"}},
    "a call": WEATHER,
    "a cut call": {**WEATHER, "max_tokens": 14},
    "one call": {**WEATHER, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "this call": {**WEATHER, "tool_choice": {"type": "tool", "name": "get_weather"}},
    "no call": {**WEATHER, "tool_choice": {"type": "none"}},
    "a schema": {**SUM, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
    "a call or a schema": {**WEATHER, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
    "a beginning": {
        **SUM,
        "messages": [*SUM["messages"], {"role": "assistant", "content": [{"type": "text", "text": "12 +"}]}],
    },
}


def ask(client: Client, work: Callable[[anthropic.AsyncAnthropic], Any]) -> Any:
    """What ``work`` returns with Anthropic's client."""

    async def main() -> Any:
        async with anthropic.AsyncAnthropic(
            base_url="http://localhost",
            api_key="any",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(client.app), timeout=60),
            _strict_response_validation=True,
        ) as api:
            return await work(api)

    return client.run(main())


def whole(client: Client, body: Body) -> anthropic.types.Message:
    message: anthropic.types.Message = ask(client, lambda api: api.messages.create(model="demo", **raw(body)))
    return message


def streamed(client: Client, body: Body) -> anthropic.types.Message:
    async def work(api: anthropic.AsyncAnthropic) -> anthropic.types.Message:
        async with api.messages.stream(model="demo", **raw(body)) as stream:
            return await stream.get_final_message()

    message: anthropic.types.Message = ask(client, work)
    return message


def raw(body: Body) -> Body:
    """Arguments of the client, which lacks some fields of the API."""
    extra = {name: body[name] for name in ("temperature", "logit_bias") if name in body}
    return {**{name: value for name, value in body.items() if name not in extra}, "extra_body": extra}


def answered(message: anthropic.types.Message) -> Body:
    """A message without what differs in each request."""
    fields = message.model_dump()
    del fields["id"], fields["usage"]
    for block in fields["content"]:
        block.pop("id", None)
    return fields


@pytest.mark.parametrize("case", CASES)
def test_a_stream_joins_to_the_whole_message(client: Client, case: str) -> None:
    message, joined = whole(client, CASES[case]), streamed(client, CASES[case])
    assert answered(joined) == answered(message)
    if case != "one call":  # the engine may be a token ahead when the answer is ended after its call
        assert joined.usage.output_tokens == message.usage.output_tokens
    assert message.content and message.id.startswith("msg_")


@pytest.mark.parametrize("case", ["text", "reasoning", "a call", "a cut call"])
def test_the_events_of_a_block_are_in_order(client: Client, case: str) -> None:
    """Each block starts, has deltas, and stops before the next one."""
    text = client.post("/v1/messages", {**CASES[case], "stream": True}).text
    events = [json.loads(data) for data in frames(text)]
    shape = "".join(
        {"content_block_start": "(", "content_block_delta": ".", "content_block_stop": ")"}.get(event["type"], "|")
        for event in events
    )
    assert re.fullmatch(r"\|(\(\.*\))+\|\|", shape), shape
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == list(range(len(starts)))
    indexes = [event["index"] for event in events if event["type"].startswith("content_block")]
    assert indexes == sorted(indexes)


def test_a_result_has_the_name_of_its_call() -> None:
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "Sunny."}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    request = CountRequest.model_validate({"messages": [*WEATHER["messages"], *messages], "tools": [TOOL]})
    assert [message.name for message in request.conversation().messages] == [None, None, "get_weather"]


def test_the_answer_is_the_model_s(client: Client, demo: slm.Model) -> None:
    expected = demo.generate(SUM["messages"], slm.Sampling(temperature=0, max_tokens=100))
    message = whole(client, SUM)
    assert [block.model_dump(include={"type", "text"}) for block in message.content] == [
        {"type": "text", "text": expected.text}
    ]
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens


def test_why_an_answer_ended(client: Client) -> None:
    reasons = {
        case: whole(client, CASES[case]).stop_reason for case in ("text", "cut", "stopped", "a call", "a cut call")
    }
    assert reasons == {
        "text": "end_turn",
        "cut": "max_tokens",
        "stopped": "stop_sequence",
        "a call": "tool_use",
        "a cut call": "max_tokens",
    }
    stopped = whole(client, CASES["stopped"])
    assert stopped.stop_sequence in ("2", "4")
    assert not any(character in block.text for block in stopped.content if block.type == "text" for character in "24")
    endless = {**SUM, "max_tokens": 5000, "logit_bias": {"2": -100}, "stop_sequences": []}
    assert whole(client, endless).stop_reason == "model_context_window_exceeded"


def test_reasoning_is_a_block_of_its_own(client: Client) -> None:
    message = whole(client, CASES["reasoning"])
    assert [block.type for block in message.content] == ["thinking", "text"]
    again = [*SUM["messages"], message.to_param(), {"role": "user", "content": "What is 1 + 1?"}]
    assert whole(client, {**SUM, "messages": again}).content


def test_a_tool_is_called_and_its_result_used(client: Client, demo: slm.Model) -> None:
    """The prompt with the result has the tokens of the same conversation in OpenAI's form."""
    call = whole(client, WEATHER)
    (block,) = [block for block in call.content if block.type == "tool_use"]
    assert (block.name, block.input) == ("get_weather", {"city": "Rome"})
    result = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": "Sunny, 30 degrees."}],
    }
    messages = [*WEATHER["messages"], call.to_param(), {"role": "user", "content": [result]}]
    answer = whole(client, {**WEATHER, "messages": messages})
    function = {"name": block.name, "arguments": json.dumps(block.input)}
    text = "".join(block.text for block in call.content if block.type == "text")
    same = client.chat(
        messages=[
            *WEATHER["messages"],
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"id": block.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": block.id, "content": "Sunny, 30 degrees."},
        ],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": TOOL["name"],
                    "description": TOOL["description"],
                    "parameters": TOOL["input_schema"],
                },
            }
        ],
    )
    assert [b.text for b in answer.content if b.type == "text"] == [same["choices"][0]["message"]["content"]]
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert total == same["usage"]["prompt_tokens"]


def test_messages_of_one_role_are_one(client: Client) -> None:
    parts = [
        {"role": "user", "content": "What is"},
        {"role": "user", "content": [{"type": "text", "text": "12 + 30?"}]},
    ]
    joined = {**SUM, "messages": [{"role": "user", "content": "What is\n\n12 + 30?"}]}
    assert answered(whole(client, {**SUM, "messages": parts})) == answered(whole(client, joined))


@pytest.mark.parametrize("case", ["text", "system", "reasoning", "a call", "this call", "a beginning"])
def test_count_tokens_counts_the_prompt(client: Client, case: str) -> None:
    prompt = {name: value for name, value in CASES[case].items() if name not in ("max_tokens", "temperature")}
    counted = ask(client, lambda api: api.messages.count_tokens(model="demo", **prompt))
    usage = whole(client, CASES[case]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_second_request_reads_the_cache(client: Client) -> None:
    body = {**SUM, "messages": [{"role": "user", "content": "A question that nobody asked before: what is 2 + 2?"}]}
    first, second = whole(client, body).usage, whole(client, body).usage
    assert second.cache_read_input_tokens and second.cache_read_input_tokens > (first.cache_read_input_tokens or 0)
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + (
        first.cache_read_input_tokens or 0
    )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"unknown": 1}, "unknown is not supported"),
        ({"container": "x"}, "container is not supported"),
        ({"stop": ["a"]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content.*image.*text.*tool_result"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, r"has \d+ tokens.*room for 2048"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "display"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused(client: Client, changes: Body, message: str) -> None:
    body = {**SUM, **changes}
    response = client.post("/v1/messages", {name: value for name, value in body.items() if value is not None})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert re.search(message, error["error"]["message"]), error


def test_an_error_after_the_first_byte_is_an_error_event(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a truncated answer would look complete."""
    from slm_core.server import anthropic_messages

    def fail(*_: object) -> None:
        raise slm.errors.DecodeFailed("a fault")

    monkeypatch.setattr(anthropic_messages.EventWriter, "end", fail)
    text = client.post("/v1/messages", {**SUM, "stream": True}).text
    assert "event: message_stop" not in text
    assert json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        streamed(client, SUM)

"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletionAllowedToolChoiceParam
from pydantic import TypeAdapter

import slm_core as slm
from server.conftest import QUESTION, Body, Client, frames
from slm_core.sampling import ORDER
from slm_core.server.anthropic_fields import MessagesRequest
from slm_core.server.openai_fields import OpenAiFields

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}], "tools": [WEATHER]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def message_of(chunks: Sequence[Body], index: int = 0) -> Body:
    """The message that the chunks of a stream join to, as the ``openai`` client joins them."""
    message: Body = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert len(delta.get("tool_calls", ())) <= 1, "clients such as instructor read only the first one of a chunk"
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def plain(message: Body) -> Body:
    """An unstreamed message in the form of ``message_of``."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "role": message["role"],
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
    }


def test_the_answer_is_the_model_s(client: Client, demo: slm.Model) -> None:
    expected = demo.generate(QUESTION["messages"], slm.Sampling(temperature=0))
    body = client.chat()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert body["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert body["model"] == "demo"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        ASKED,
        {**ASKED, "parallel_tool_calls": False},
        {**ASKED, "tool_choice": "required"},
        {**ASKED, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {**ASKED, "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "high", "max_tokens": 5},
        {"n": 2, "temperature": 1.5, "seed": 7, "max_tokens": 20},
        {"stop": "=", "max_tokens": 30},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
def test_joined_deltas_equal_the_unstreamed_answer(client: Client, fields: Body) -> None:
    whole, chunks = client.chat(**fields), client.stream(**fields)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert message_of(chunks, choice["index"]) == plain(choice["message"])
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in mine[:-1])
        if fields.get("logprobs"):
            tokens = [token for c in mine if c["logprobs"] for token in c["logprobs"]["content"]]
            assert [token["token"] for token in tokens] == [t["token"] for t in choice["logprobs"]["content"]]
            assert b"".join(bytes(token["bytes"]) for token in tokens[:-1]).decode() == choice["message"]["content"]


def test_tools_are_called(client: Client) -> None:
    (choice,) = client.chat(**ASKED)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"condition": "sunny", "degrees": 21}'}
    answer = client.chat(messages=[*ASKED["messages"], choice["message"], result], tools=[WEATHER])
    assert "21" in answer["choices"][0]["message"]["content"]


def test_usage_counts_the_tokens_up_to_the_first_call(client: Client) -> None:
    """The engine may be a few tokens ahead when the answer is cut after its call: how many depends on the threads."""
    answer = client.chat(**ASKED, parallel_tool_calls=False, logprobs=True, eog_bias=-1000, max_tokens=200)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


SCHEMA: Body = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
TIME: Body = {"type": "function", "function": {"name": "get_time", "description": "Get the time."}}


def allowed(mode: str, *tools: Body) -> Body:
    """A choice, which is of the type of OpenAI's client."""
    names = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    TypeAdapter(ChatCompletionAllowedToolChoiceParam).validate_python(choice)
    return choice


def test_only_allowed_tools_are_called(client: Client) -> None:
    """The model reads all of them: the prompt is the same."""
    asked = {**ASKED, "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 100}
    free = client.chat(**asked)
    assert names_of(free) == ["get_weather"]
    for mode, tools, names in (
        ("auto", [WEATHER, TIME], ["get_weather"]),
        ("required", [TIME, WEATHER], ["get_weather"]),
        ("required", [TIME], ["get_time"]),
    ):
        body = client.chat(**asked, tool_choice=allowed(mode, *tools))
        assert set(names_of(body)) == set(names)
        assert body["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]
    assert "get_weather" not in names_of(client.chat(**asked, tool_choice=allowed("auto", TIME)))


def names_of(body: Body) -> list[str]:
    return [call["function"]["name"] for call in body["choices"][0]["message"].get("tool_calls", ())]


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_calls_tools_or_has_the_response_format(client: Client, *, thinking: bool) -> None:
    fields = {"tools": [WEATHER], "response_format": SCHEMA, "max_tokens": 300, "temperature": 0}
    fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    assert names_of(client.chat(**fields, messages=ASKED["messages"])) == ["get_weather"]
    for asked in (
        {"messages": [{"role": "user", "content": "Describe Ada, who is 36, as JSON."}]},
        {"messages": ASKED["messages"], "tool_choice": "none"},
        {"temperature": 1.5, "seed": 5},
    ):
        message = client.chat(**{**fields, **asked})["choices"][0]["message"]
        if "tool_calls" not in message:
            jsonschema.validate(json.loads(message["content"]), PERSON)
        assert "tool_calls" not in message or "seed" in asked


def test_a_forced_call_continues_a_message(client: Client) -> None:
    """The content has closed the reasoning: it is not closed again."""
    messages = [*ASKED["messages"], {"role": "assistant", "content": "I look it up.\n"}]
    fields: Body = {"messages": messages, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    fields["chat_template_kwargs"] = {"enable_thinking": True}
    message = client.chat(**fields, continue_final_message=True)["choices"][0]["message"]
    assert message["content"] in ("", None) and "reasoning_content" not in message and message["tool_calls"]


def test_a_forced_call_goes_with_a_response_format(client: Client) -> None:
    body = client.chat(tools=[WEATHER], tool_choice="required", response_format=SCHEMA, max_tokens=100)
    assert names_of(body)


def test_no_tool_is_called_if_none_is_chosen(client: Client) -> None:
    (choice,) = client.chat(**ASKED, tool_choice="none", max_tokens=20)["choices"]
    assert "tool_calls" not in choice["message"]


def test_reasoning_is_separate(client: Client) -> None:
    (choice,) = client.chat(chat_template_kwargs={"enable_thinking": True})["choices"]
    assert choice["message"]["reasoning_content"]
    assert "think" not in choice["message"]["content"]


def test_a_schema_is_enforced(client: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    (choice,) = client.chat(response_format=form, temperature=1.5, seed=3)["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


def test_a_schema_applies_after_the_reasoning(client: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    body = client.chat(response_format=form, chat_template_kwargs={"enable_thinking": True}, max_tokens=300)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"]
    jsonschema.validate(json.loads(message["content"]), PERSON)


def test_a_seed_repeats_an_answer(client: Client) -> None:
    fields = {"temperature": 2.0, "seed": 11, "max_tokens": 20, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
    assert client.chat(**fields)["choices"] == client.chat(**fields)["choices"]
    assert client.chat(**fields)["choices"] != client.chat(**{**fields, "seed": 12})["choices"]


def test_a_bias_bans_a_token(client: Client, demo: slm.Model) -> None:
    first = client.chat()["choices"][0]["message"]["content"][0]
    (banned,) = demo.vocab.encode(first, add_special=False, parse_special=False)[-1:]
    assert client.chat(logit_bias={str(banned): -100})["choices"][0]["message"]["content"][:1] != first


def test_every_sampling_option_has_a_field_in_each_api() -> None:
    """``custom`` names steps of plugins; Anthropic's answers have no log probabilities."""
    options = {field.name for field in dataclasses.fields(slm.Sampling)} - {"custom"}
    assert options - set(OpenAiFields.model_fields) - {"max_tokens", "logprobs"} == set()
    assert options - set(MessagesRequest.model_fields) == {"logprobs"}


def test_banned_tokens_and_a_bias_against_the_end(client: Client, demo: slm.Model) -> None:
    usual = client.chat(max_tokens=40)["choices"][0]
    assert usual["finish_reason"] == "stop"
    first = demo.vocab.encode(usual["message"]["content"][0], add_special=False, parse_special=False)[-1]
    assert client.chat(banned_tokens=[first])["choices"][0]["message"]["content"][:1] != usual["message"]["content"][0]
    endless = client.chat(eog_bias=-1e30, max_tokens=40, min_keep=2, order=list(ORDER))["choices"][0]
    assert endless["finish_reason"] == "length"


def test_a_last_chunk_has_the_usage(client: Client) -> None:
    *chunks, last = client.stream(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == client.chat()["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_length_is_no_stop(client: Client) -> None:
    """Otherwise a truncated answer would look complete."""
    assert client.chat(max_tokens=3)["choices"][0]["finish_reason"] == "length"
    assert client.stream(max_tokens=3)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_continued_message(client: Client) -> None:
    messages = [*QUESTION["messages"], {"role": "assistant", "content": "12 + 30 ="}]
    body = client.chat(messages=messages, continue_final_message=True)
    assert body["choices"][0]["message"]["content"].strip() == "42"


def test_a_prompt_too_long_is_refused(client: Client, demo: slm.Model) -> None:
    """Rather than truncated without an error."""
    messages = [{"role": "user", "content": "hi " * 3000}]
    response = client.post("/v1/chat/completions", {**QUESTION, "messages": messages})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    tokens = demo.model.vocab.encode("hi " * 3000, add_special=False, parse_special=False)
    named = [int(word) for word in error["message"].replace(",", " ").split() if word.isdigit()]
    assert named[1] == 2048
    assert len(tokens) < named[0] < len(tokens) + 30


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({**ASKED, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"model": "unknown"}, "model"),
    ],
    ids=str,
)
def test_a_parameter_that_does_not_work_is_named(client: Client, fields: Body, param: str) -> None:
    response = client.post("/v1/chat/completions", {**QUESTION, **fields})
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(client: Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.call("POST", "/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_parameters_without_effect_are_accepted(client: Client) -> None:
    fields: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert client.chat(**fields)["choices"] == client.chat()["choices"]


def test_the_log_has_no_prompt(client: Client) -> None:
    client.post("/v1/chat/completions", {**QUESTION, "messages": [{"role": "user", "content": "the secret word"}]})
    client.post("/v1/chat/completions", {**QUESTION, "stop": 7, "user": "the secret word"})
    lines = [json.loads(line) for line in client.log.getvalue().splitlines()]
    assert all({"request_id", "status"} <= line.keys() for line in lines if line["event"] == "request")
    assert "secret" not in client.log.getvalue()


def test_a_request_keeps_its_id(client: Client) -> None:
    assert client.get("/health", **{"x-request-id": "my-id"}).headers["x-request-id"] == "my-id"
    assert client.get("/health", **{"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_frames_are_json(client: Client) -> None:
    text = client.post("/v1/chat/completions", {**QUESTION, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    assert len(frames(text)) == text.count("\n\n")

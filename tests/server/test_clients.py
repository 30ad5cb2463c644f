"""Requests of real clients: answers sent back as messages, fields of newer API versions, unsupported parts."""

from __future__ import annotations

from typing import Any

import pytest

from server.conftest import QUESTION, Client

anthropic_types = pytest.importorskip("anthropic.types", reason="a client whose types are the oracle")
chat_types = pytest.importorskip("openai.types.chat", reason="a client whose types are the oracle")
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_an_answer_is_sent_back_as_openai_s_client_dumps_it(client: Client) -> None:
    """With a null for each field of its class that the answer lacks."""
    message = client.chat()["choices"][0]["message"]
    dumped = chat_types.ChatCompletionMessage.model_validate(message).model_dump()
    assert "audio" in dumped and dumped["audio"] is None
    messages = [*QUESTION["messages"], {**dumped, "annotations": []}, *QUESTION["messages"]]
    assert client.chat(messages=messages)["choices"][0]["message"]["content"] == "12 + 30 = 42"


def test_an_answer_is_sent_back_as_anthropic_s_client_dumps_it(client: Client) -> None:
    body = {**QUESTION, "max_tokens": 20}
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}, "caller": None}
    dumped = anthropic_types.ToolUseBlock.model_validate(call).model_dump()
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    messages = [
        *QUESTION["messages"],
        {"role": "assistant", "content": [{**dumped, "of_a_newer_version": None}]},
        {"role": "user", "content": [result]},
    ]
    response = client.post("/v1/messages", {**body, "messages": messages, "tools": [TOOL]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("fields", [{"verbosity": "low"}, {"reasoning_effort": "xhigh"}, {"reasoning_effort": "max"}])
def test_fields_of_newer_models(client: Client, fields: dict[str, Any]) -> None:
    assert client.chat(**fields)["choices"][0]["message"]["content"] == "12 + 30 = 42"


def test_an_unknown_field_is_absent_if_it_is_null(client: Client) -> None:
    assert client.chat(audio=None)["choices"][0]["message"]["content"] == "12 + 30 = 42"
    refused = client.post("/v1/chat/completions", {**QUESTION, "other": None, "audio": {}})
    assert refused.json()["error"]["message"] == "audio is not supported"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type: 'image_url' is not supported (accepted: 'text')",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "function", "name": "f", "content": "x"}]},
            "messages[0].role: 'function' is not supported"
            " (accepted: 'system', 'developer', 'user', 'assistant', 'tool')",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].message.content[0].type: 'input_image' is not supported (accepted: 'input_text', 'output_text')",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1},
            "messages[0].content[0].type: 'image' is not supported (accepted: 'text', 'tool_result')",
        ),
        ("/api/generate", {"model": "demo", "prompt": "x", "images": ["aGk="]}, "images is not supported"),
    ],
)
def test_other_kinds_of_parts_are_named(client: Client, path: str, fields: dict[str, Any], message: str) -> None:
    """The message names the kind of the part, unlike pydantic's "Input should be 'text'"."""
    response = client.post(path, fields)
    error = response.json()["error"]
    assert (response.status_code, error if isinstance(error, str) else error["message"]) == (400, message)

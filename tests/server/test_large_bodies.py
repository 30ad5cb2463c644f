"""Large bodies are validated outside the event loop, and have one error however much of them is invalid."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi._compat import ModelField
from pydantic import BaseModel, ValidationError

import slm_core as slm
from server.conftest import Client
from server.test_lost_clients import Fixture
from slm_core.server import ServedModel, ServerOptions, create_app, large_bodies
from slm_core.server.anthropic_fields import CountRequest, MessagesRequest
from slm_core.server.embeddings import EmbeddingsRequest, RerankRequest
from slm_core.server.fields import Strict, _checked_tokens
from slm_core.server.large_bodies import LARGE_BYTES
from slm_core.server.ollama_fields import ChatRequest
from slm_core.server.openai_chat import ChatCompletionRequest
from slm_core.server.openai_completions import CompletionRequest
from slm_core.server.responses_fields import ResponsesRequest
from slm_core.server.run import Server, run
from slm_core.server.session_turns import TurnRequest
from slm_core.server.tokens import DetokenizeRequest

MESSAGES = [{"role": "user", "content": "x"}] * 400
LARGE: dict[str, tuple[type[BaseModel], str, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, "generation", {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, "generations", {"prompt": "x" * 10_000}),
    "/v1/responses": (ResponsesRequest, "generation", {"input": MESSAGES}),
    "/v1/messages": (MessagesRequest, "generation", {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountRequest, "conversation", {"messages": MESSAGES}),
    "/api/chat": (ChatRequest, "generation", {"messages": MESSAGES, "model": "stub"}),
    "/v1/sessions/{id}/messages": (TurnRequest, "generation", {"messages": MESSAGES}),
}


@pytest.mark.parametrize("path", LARGE)
def test_other_requests_do_not_wait_for_a_large_body(
    demo: slm.Model, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Otherwise a body of 20,000 messages would stop all streams for a second."""
    kind, translates, body = LARGE[path]
    fixture = Fixture(demo.info, n_ctx=500)
    if "{id}" in path:
        path = path.replace("{id}", fixture.client.post("/v1/sessions", {}).json()["id"])
    threads: dict[str, list[int]] = {"validate": [], "translate": []}

    def noted(what: str, function: Callable[..., Any], is_noted: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if is_noted(*arguments):
                threads[what].append(threading.get_ident())
            return function(*arguments, **options)

        return call

    # The body again, when it was validated, costs nothing.
    parsed = noted("validate", ModelField.validate, lambda _, value, *rest: isinstance(value, dict))
    monkeypatch.setattr(ModelField, "validate", parsed)
    monkeypatch.setattr(kind, translates, noted("translate", getattr(kind, translates), lambda *_: True))
    refused = fixture.client.post(path, body)
    assert path.endswith("count_tokens") or "but the context has room for" in refused.text, "nothing is generated"
    fixture.client.run(fixture.app.state.registry.close())
    assert len(threads["validate"]) == len(threads["translate"]) == 1
    assert threading.get_ident() not in [*threads["validate"], *threads["translate"]], "the loop's thread"


def test_the_gil_is_given_up_between_the_parts_of_a_body() -> None:
    """Pydantic would hold the GIL for a whole body, even in a thread. Calls of Python code release it in between."""
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is Strict._without_more_unknown.__func__.__code__  # type: ignore[attr-defined]

    sys.setprofile(count)
    try:
        ChatCompletionRequest.model_validate({"messages": MESSAGES})
    finally:
        sys.setprofile(None)
    assert calls >= len(MESSAGES)


def calls_of(function: Callable[..., Any], work: Callable[[], object]) -> int:
    """How often work calls a function of Python, or begins another round of a loop in it."""
    calls = 0

    def count(frame: Any, event: str, _: object) -> Any:
        nonlocal calls
        if frame.f_code is not function.__code__:
            return None
        calls += 1
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return calls


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1] * 400}),
        (CompletionRequest, {"prompt": [[1] * 400]}),
        (EmbeddingsRequest, {"input": [1] * 400}),
        (DetokenizeRequest, {"tokens": [1] * 400}),
        (ChatCompletionRequest, {"messages": MESSAGES[:1], "banned_tokens": [1] * 400}),
    ],
)
def test_the_gil_is_given_up_between_tokens(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """[8 million tokens hold the GIL for a second]"""
    assert calls_of(_checked_tokens, lambda: kind.model_validate(body)) >= 400
    assert kind.model_validate(body).model_dump(include=set(body), exclude_none=True)[max(body)] == body[max(body)]


def test_the_gil_is_given_up_between_numbers(client: Client) -> None:
    text = json.dumps({"tokens": [1] * 4000 + [0.5] * 4000}).encode()
    assert len(text) > LARGE_BYTES
    counted = {"integers": 0, "numbers": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, function, kind in (("integers", "_integer", int), ("numbers", "_number", float)):

            def call(value: str, name: str = name, kind: type = kind) -> Any:
                counted[name] += 1
                return kind(value)

            patch.setattr(large_bodies, function, call)
        response = client.call("POST", "/detokenize", content=text, headers={"content-type": "application/json"})
    assert counted == {"integers": 4000, "numbers": 4000}
    assert response.json()["error"]["message"] == "tokens[4000]: Input should be a valid integer"


@pytest.mark.parametrize(("wrong", "param"), [([1, True], "[1]"), ([1, "a"], "[1]"), ([[1], [2, "a"]], "[1][1]")])
def test_a_wrong_token_is_named(client: Client, wrong: list[Any], param: str) -> None:
    for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        error = client.post(path, {name: wrong}).json()["error"]
        assert (error["param"], error["message"]) == (
            f"{name}{param}",
            f"{name}{param}: Input should be a valid integer",
        )


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": 3}]}, "messages[400].content: "),
        ("/v1/chat/completions", {"messages": MESSAGES, "other": 1}, "other is not supported"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": "1"}, "max_tokens: "),
        ("/v1/embeddings", {"input": ["x" * 10_000, 1]}, "input"),
    ],
)
def test_errors_of_large_bodies_are_those_of_small_ones(client: Client, path: str, body: Any, message: str) -> None:
    response = client.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(("text", "status"), [(b"[" * 100_000, 400), (b'{"messages": [' + b"\xff" * 10_000, 400)])
def test_large_bodies_that_are_no_json(client: Client, text: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = client.call("POST", "/v1/chat/completions", content=text, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, "invalid_json")


def test_collections_of_garbage_do_not_visit_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a large body would make Python visit all objects of imported libraries, while all streams wait."""
    order: list[str] = []
    monkeypatch.setattr("gc.freeze", lambda: order.append("freeze"))
    monkeypatch.setattr(Server, "run", lambda server, sockets: server._say())
    run(create_app([ServedModel("none", slm.load)], log=None), ServerOptions(), 0, lambda _: order.append("serve"))
    assert order == ["freeze", "serve"]


MANY = 1000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": [1] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}),
        (ChatCompletionRequest, {"messages": MESSAGES, "logit_bias": {str(i): "a" for i in range(MANY)}}),
        (ChatCompletionRequest, {"messages": MESSAGES, "metadata": dict.fromkeys(map(str, range(MANY)), 1)}),
        (ChatCompletionRequest, {"messages": MESSAGES, **dict.fromkeys(map(str, range(MANY)), 1)}),
        (ChatCompletionRequest, {"messages": MESSAGES, "tools": [{}] * MANY}),
        (ChatCompletionRequest, {"messages": MESSAGES, "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, {"prompt": [[1]] * MANY + ["a"]}),
        (EmbeddingsRequest, {"input": [1.5] * MANY}),
        (RerankRequest, {"query": "a", "documents": [1] * MANY}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
        (ResponsesRequest, {"input": [1] * MANY}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [1] * MANY}], "max_tokens": 1}),
        (ChatRequest, {"model": "a", "messages": [1] * MANY}),
    ],
)
def test_a_body_has_few_errors(kind: type[BaseModel], body: Any) -> None:
    """16 MiB of wrong items could be 8 million errors: gigabytes and minutes. A union has the errors of its members."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 10


def test_the_first_unknown_field_is_named(client: Client) -> None:
    """Also if known ones follow more unknown ones than there are known ones."""
    body = {**dict.fromkeys((f"unknown{i}" for i in range(MANY)), 1), "messages": [{"role": "user", "content": "x"}]}
    response = client.post("/v1/chat/completions", body)
    assert response.json()["error"]["message"] == "unknown0 is not supported"

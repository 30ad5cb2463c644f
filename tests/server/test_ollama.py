"""Ollama's API: its own client reads the answers, and validates their form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import numpy as np
import ollama
import pytest

import slm_core as slm
from server.conftest import Body, Client
from server.test_openai_chat import PERSON, QUESTION, WEATHER
from slm_core.server.embeddings import truncated
from slm_core.server.ollama_models import capabilities

SURE = {"temperature": 0, "num_predict": 100}
SUM: Body = {"messages": QUESTION["messages"], "options": SURE}
ASKED: Body = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [WEATHER],
    "options": SURE,
}
CASES: dict[str, Body] = {
    "text": SUM,
    "cut": {**SUM, "options": {**SURE, "num_predict": 3}},
    "stopped": {**SUM, "options": {**SURE, "stop": ["2", "4"]}},
    "reasoning": {**SUM, "think": True, "options": {**SURE, "num_predict": 300}},
    "no reasoning": {**SUM, "think": False},
    "a call": ASKED,
    "a cut call": {**ASKED, "options": {**SURE, "num_predict": 14}},
    "an object": {**SUM, "format": "json"},
    "a schema": {**SUM, "format": PERSON},
    "a call or a schema": {**ASKED, "format": PERSON},
    "logprobs": {**SUM, "logprobs": True, "top_logprobs": 2},
    "a beginning": {**SUM, "messages": [*QUESTION["messages"], {"role": "assistant", "content": "12 +"}]},
}


def ask(client: Client, method: str, **body: Any) -> Any:
    """What a method of Ollama's client returns; the parts of a stream."""

    async def main() -> Any:
        api = ollama.AsyncClient(host="http://localhost")
        await api._client.aclose()
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            api._client = http
            result = await getattr(api, method)(**body)
            return [part async for part in result] if body.get("stream") else result

    return client.run(main())


def joined(parts: list[Any], kind: str) -> Body:
    """The message that a client joins from the parts of a stream."""
    *body, last = [part.model_dump() for part in parts]
    assert last["done"] and not any(part["done"] for part in body)
    messages = [part["message"] if kind == "chat" else part for part in (*body, last)]
    text = "content" if kind == "chat" else "response"
    return {
        "text": "".join(message[text] or "" for message in messages),
        "thinking": "".join(message["thinking"] or "" for message in messages),
        "calls": [call for message in messages for call in message.get("tool_calls") or ()],
        "logprobs": [entry for part in (*body, last) for entry in part["logprobs"] or ()],
        "done_reason": last["done_reason"],
        "counts": (last["prompt_eval_count"], last["eval_count"]),
    }


@pytest.mark.parametrize("case", CASES)
def test_a_stream_joins_to_the_whole_answer(client: Client, case: str) -> None:
    body = {"model": "demo", **CASES[case]}
    whole = joined([ask(client, "chat", **body)], "chat")
    assert joined(ask(client, "chat", **body, stream=True), "chat") == whole
    assert whole["text"] or whole["calls"]


def test_the_answer_is_the_model_s(client: Client, demo: slm.Model) -> None:
    expected = demo.generate(SUM["messages"], slm.Sampling(temperature=0, max_tokens=100))
    answer = ask(client, "chat", model="demo:latest", **SUM)
    assert answer.message.content == expected.text
    assert answer.done_reason == "stop"
    assert (answer.prompt_eval_count, answer.eval_count) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert 0 < answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration


def test_options_are_those_of_the_sampling(client: Client, demo: slm.Model) -> None:
    options = {
        "temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repeat_penalty": 1.2,
        "repeat_last_n": 20, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 11, "num_predict": 20,
    }  # fmt: skip
    same = {name: value for name, value in options.items() if name not in ("repeat_last_n", "num_predict")}
    expected = demo.generate(SUM["messages"], slm.Sampling(penalty_window=20, max_tokens=20, **same))  # type: ignore[arg-type]
    assert ask(client, "chat", model="demo", messages=SUM["messages"], options=options).message.content == expected.text


def test_a_cut_call_is_no_call(client: Client) -> None:
    """A client runs the calls that it gets."""
    answer = ask(client, "chat", model="demo", **CASES["a cut call"])
    assert answer.done_reason == "length" and not answer.message.tool_calls
    assert "get_weather" in answer.message.content


def test_a_tool_is_called_and_its_result_used(client: Client) -> None:
    """The prompt with the result has the tokens of the same conversation in OpenAI's form."""
    first = ask(client, "chat", model="demo", **ASKED)
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny, 30 degrees."}
    messages = [*ASKED["messages"], first.message.model_dump(exclude_none=True), result]
    # Not with Ollama's client: it changes the order of a schema's keys.
    answer = client.post("/api/chat", {**ASKED, "model": "demo", "messages": messages, "stream": False}).json()
    function = {"name": "get_weather", "arguments": json.dumps(call.function.arguments)}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    same = client.chat(
        messages=[
            *ASKED["messages"],
            {"role": "assistant", "content": first.message.content, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call00000", "content": "Sunny, 30 degrees."},
        ],
        tools=[WEATHER],
    )
    assert answer["message"]["content"] == same["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == same["usage"]["prompt_tokens"]


def test_answers_fit_their_format(client: Client) -> None:
    jsonschema.validate(json.loads(ask(client, "chat", model="demo", **CASES["a schema"]).message.content), PERSON)


@pytest.mark.parametrize("body", [{}, {"system": "Be short."}, {"raw": True}, {"format": PERSON}, {"think": True}])
def test_generate(client: Client, demo: slm.Model, body: Body) -> None:
    options = {"model": "demo", "prompt": "What is 12 + 30?", "options": {**SURE, "num_predict": 200}, **body}
    whole = joined([ask(client, "generate", **options)], "generate")
    assert joined(ask(client, "generate", **options, stream=True), "generate") == whole
    if body == {"raw": True}:
        assert whole["text"] == demo.generate(options["prompt"], slm.Sampling(temperature=0, max_tokens=200)).text
    if body == {"think": True}:
        assert whole["thinking"]


@pytest.mark.parametrize("body", [{"prompt": ""}, {"messages": []}])
def test_a_request_without_a_prompt_loads_the_model(client: Client, body: Body) -> None:
    answer = ask(client, "generate" if "prompt" in body else "chat", model="demo", **body)
    assert (answer.done, answer.done_reason) == (True, "load")


def test_a_model_is_unloaded_and_loaded_again(client: Client) -> None:
    answer = ask(client, "generate", model="demo", prompt="", keep_alive=0)
    assert (answer.done, answer.done_reason) == (True, "unload")
    assert ask(client, "ps").models == []
    assert not client.get("/v1/models/demo").json()["loaded"]
    for path, is_loaded in (("load", True), ("unload", False), ("load", True)):
        assert client.post(f"/v1/models/demo/{path}", {}).json()["loaded"] is is_loaded
    assert client.post("/v1/models/none/unload", {}).status_code == 404


def test_models(client: Client, demo: slm.Model) -> None:
    client.chat()
    (model,) = ask(client, "list").models
    (running,) = ask(client, "ps").models
    assert (model.model, model.size, model.digest) == ("demo", demo.info.n_bytes, demo.info.fingerprint)
    assert (running.name, running.context_length) == ("demo", 2048)
    shown = ask(client, "show", model="demo")
    assert shown.details.family == demo.info.architecture == shown.modelinfo["general.architecture"]
    assert shown.template == demo.info.chat_template
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert client.get("/api/version").json()["version"]
    assert client.call("HEAD", "/").status_code == 200


def test_embeddings_are_the_model_s(client: Client, demo: slm.Model) -> None:
    texts = ["a dog", "the stock market"]
    n_tokens = sum(len(demo.vocab.encode(text, add_special=True, parse_special=False)) for text in texts)
    answer = ask(client, "embed", model="demo:latest", input=texts, options={"temperature": 0}, keep_alive="5m")
    assert np.array_equal(np.array(answer.embeddings, np.float32), demo.embed(texts).vectors)
    assert (answer.model, answer.prompt_eval_count) == ("demo", n_tokens)
    assert answer.total_duration > answer.load_duration >= 0
    (one,) = ask(client, "embed", model="demo", input=texts[0]).embeddings
    assert np.array_equal(np.array(one, np.float32), demo.embed(texts[0]).vectors[0])
    older = ask(client, "embeddings", model="demo", prompt=texts[0]).embedding
    assert np.array_equal(np.array(older, np.float32), demo.embed(texts[0], normalize=False).vectors[0])


def test_an_embedding_is_shortened(client: Client, demo: slm.Model) -> None:
    """A prefix of the vector, of length 1: the direction of the first numbers."""
    prefix = demo.embed("a dog").vectors[0, :5]
    for path in ("/api/embed", "/v1/embeddings"):
        body = client.post(path, {"model": "demo", "input": "a dog", "dimensions": 5}).json()
        vector = body["embeddings"][0] if path == "/api/embed" else body["data"][0]["embedding"]
        assert np.allclose(vector, prefix / np.linalg.norm(prefix), rtol=1e-6)


def test_a_model_of_embeddings_says_so(demo: slm.Model) -> None:
    """Ollama's rule: the file has a pooling."""
    running: Any = SimpleNamespace(model=SimpleNamespace(info=replace(demo.info, pooling=slm.Pooling.MEAN)))
    assert capabilities(running) == ["embedding"]


def test_a_text_is_truncated_at_its_end(client: Client, demo: slm.Model) -> None:
    text = "one two three four five six seven eight nine"
    tokens = demo.vocab.encode(text, add_special=True, parse_special=False)
    answer = ask(client, "embed", model="demo", input=text, options={"num_ctx": 4})
    assert np.array_equal(np.array(answer.embeddings, np.float32), demo.embed([tokens[:4]]).vectors)
    assert answer.prompt_eval_count == 4
    older = ask(client, "embeddings", model="demo", prompt=text, options={"num_ctx": 4}).embedding
    assert np.array_equal(np.array(older, np.float32), demo.embed([tokens[:4]], normalize=False).vectors[0])


@pytest.mark.parametrize(("first", "last"), [([1], [2]), ([1], []), ([], []), ([], [2])])
def test_special_tokens_around_a_truncated_text_stay(first: list[int], last: list[int]) -> None:
    class Vocab:
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            assert add_special and not parse_special
            return [*first, *(ord(letter) for letter in text), *last]

    vocab: Any = Vocab()
    full = vocab.encode("abcdef", add_special=True, parse_special=False)
    for n in range(len(first) + len(last) + 1, len(full) + 2):
        n_letters = min(6, n - len(first) - len(last))
        assert truncated(vocab, full, n) == [*first, *map(ord, "abcdef"[:n_letters]), *last]


def test_an_embedding_of_nothing_loads_the_model(client: Client) -> None:
    assert ask(client, "embed", model="demo", input="").embeddings == []
    assert ask(client, "embeddings", model="demo", prompt="").embedding == []
    assert ask(client, "embed", model="demo", input=[], keep_alive=0).embeddings == []
    assert not client.get("/v1/models/demo").json()["loaded"]


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        ("chat", {"unknown": 1}, 400, "unknown is not supported"),
        ("chat", {"options": {"tfs_z": 1}}, 400, "options.tfs_z is not supported"),
        ("chat", {"options": {"num_ctx": 4096}}, 400, "4096.*2048"),
        ("chat", {"options": {"temperature": -1}}, 400, "temperature"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "images"),
        ("chat", {"messages": [{"role": "user", "content": "word " * 5000}]}, 400, r"\d+ tokens.*room for 2048"),
        ("chat", {"model": "none"}, 404, "there is no model 'none'"),
        ("chat", {"format": "xml"}, 400, "format"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "no tokens for text with a gap"),
        ("generate", {"prompt": "a", "suffix": "b", "think": True}, 400, "think does not go with suffix"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system does not go with raw"),
        ("show", {"model": "none"}, 404, "there is no model"),
        ("embed", {"input": "a", "model": "none"}, 404, "there is no model"),
        ("embed", {"input": ["a", ""]}, 400, "input has a text without tokens"),
        ("embed", {"input": [[1, 2]]}, 400, "input"),
        ("embed", {"input": "a", "dimensions": 10**6}, 400, r"dimensions is 1000000, .*vectors have \d+"),
        ("embed", {"input": "word " * 5000, "truncate": False}, 400, r"\d+ tokens, .* room for 1024"),
        ("embed", {"input": "a", "options": {"num_ctx": 4096}}, 400, "4096.*2048"),
        ("embeddings", {"prompt": ["a"]}, 400, "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused(client: Client, path: str, changes: Body, status: int, message: str) -> None:
    base = {"chat": {"messages": SUM["messages"]}}.get(path, {})
    response = client.post(f"/api/{path}", {"model": "demo", **base, **changes})
    assert response.status_code == status, response.text
    assert re.search(message, response.json()["error"])


def test_an_error_after_the_first_byte_ends_the_stream(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a truncated answer would look complete."""
    from slm_core.server.ollama import LineWriter

    def fail(*_: object) -> None:
        raise slm.errors.DecodeFailed("a fault")

    monkeypatch.setattr(LineWriter, "end", fail)
    lines = client.post("/api/chat", {"model": "demo", **SUM}).text.splitlines()
    assert set(json.loads(lines[-1])) == {"error"}
    assert not any(json.loads(line)["done"] for line in lines[:-1])
    with pytest.raises(ollama.ResponseError):
        ask(client, "chat", model="demo", **SUM, stream=True)

"""Texts without an answer: tokens, templates, embeddings and ranking."""

from __future__ import annotations

import base64
import re
import threading
from typing import Any

import jinja2
import numpy as np
import openai
import pytest

import slm_core as slm
from server.conftest import QUESTION, Body, Client
from server.test_openai_chat import WEATHER

TEXTS = ["a dog", "a puppy", "the stock market", "Grüße 🙂 <|im_end|>"]


@pytest.mark.parametrize("text", [*TEXTS, ""])
@pytest.mark.parametrize("options", [{}, {"add_special": True}, {"parse_special": True}], ids=str)
def test_tokens_are_the_vocabulary_s(client: Client, demo: slm.Model, text: str, options: dict[str, bool]) -> None:
    expected = demo.vocab.encode(text, **{"add_special": False, "parse_special": False, **options})
    answers = [client.post("/tokenize", {name: text, **options}).json() for name in ("content", "prompt")]
    assert answers == [{"tokens": expected, "count": len(expected), "max_model_len": 2048}] * 2
    back = client.post("/detokenize", {"tokens": expected}).json()
    assert back["content"] == back["prompt"] == demo.vocab.decode(expected, special=True)


def test_the_other_name_of_add_special(client: Client, demo: slm.Model) -> None:
    expected = demo.vocab.encode("a", add_special=True, parse_special=False)
    assert client.post("/tokenize", {"prompt": "a", "add_special_tokens": True}).json()["tokens"] == expected


def test_a_client_can_render_prompts(client: Client, demo: slm.Model) -> None:
    info, messages = client.get("/tokenizer_info").json(), QUESTION["messages"]
    template = jinja2.Environment().from_string(info["chat_template"])
    for adds in (True, False):
        rendered = template.render(messages=messages, add_generation_prompt=adds, bos_token=info["bos_token"])
        body = {"messages": messages, "add_generation_prompt": adds}
        assert rendered == client.post("/apply-template", body).json()["prompt"]
    assert rendered != client.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert demo.vocab.encode(info["eos_token"], add_special=False, parse_special=True) == [demo.vocab.eos]
    assert client.get("/tokenizer_info?model=none").status_code == 404


def test_pieces_are_texts_or_bytes(client: Client, demo: slm.Model) -> None:
    pieces = client.post("/tokenize", {"content": "Grüße 🙂", "with_pieces": True}).json()["tokens"]
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == "Grüße 🙂"
    assert any(isinstance(p["piece"], list) for p in pieces), "the demo model has tokens for parts of a character"
    assert [p["id"] for p in pieces] == demo.vocab.encode("Grüße 🙂", add_special=False, parse_special=False)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": QUESTION["messages"]},
        {"messages": QUESTION["messages"], "tools": [WEATHER]},
        {"messages": QUESTION["messages"], "reasoning_effort": "high"},
        {
            "messages": [*QUESTION["messages"], {"role": "assistant", "content": "12"}],
            "continue_final_message": True,
        },
    ],
)
def test_the_prompt_of_a_conversation(client: Client, demo: slm.Model, body: Body) -> None:
    """It has as many tokens as the request computes; its text, with control tokens, has the same tokens."""
    tokens = client.post("/tokenize", body).json()
    prompt = client.post("/apply-template", body).json()["prompt"]
    assert tokens["tokens"] == demo.vocab.encode(prompt, add_special=False, parse_special=True)
    assert tokens["count"] == client.chat(**body, max_tokens=1)["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def vectors(demo: slm.Model) -> np.ndarray:
    return demo.embed(TEXTS).vectors


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_the_model_s(client: Client, demo: slm.Model, vectors: np.ndarray, encoding: str) -> None:
    body = client.post("/v1/embeddings", {"input": TEXTS, "encoding_format": encoding}).json()
    embeddings = [each["embedding"] for each in body["data"]]
    if encoding == "base64":
        embeddings = [np.frombuffer(base64.b64decode(text), "<f4") for text in embeddings]
    else:
        openai.types.CreateEmbeddingResponse.model_validate(body)
    assert np.array_equal(np.array(embeddings, np.float32), vectors)
    n_tokens = sum(len(demo.vocab.encode(text, add_special=True, parse_special=False)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def test_embeddings_of_tokens(client: Client, demo: slm.Model) -> None:
    tokens = [demo.vocab.encode(text, add_special=True, parse_special=False) for text in TEXTS[:2]]
    width = demo.info.n_embd
    for value, texts in ((tokens[1], TEXTS[1:2]), (tokens, TEXTS[:2])):
        data = client.post("/v1/embeddings", {"input": value, "dimensions": width}).json()["data"]
        embeddings = np.array([each["embedding"] for each in data], np.float32)
        assert np.array_equal(embeddings, demo.embed(texts).vectors)
        assert np.array_equal(embeddings, demo.embed(tokens[-len(texts) :]).vectors)


def test_many_texts(client: Client, demo: slm.Model) -> None:
    """Eight are computed together: the same as eight in a call of the model."""
    texts = [f"text number {i}" for i in range(21)]
    data = client.post("/v1/embeddings", {"input": texts}).json()["data"]
    assert [each["index"] for each in data] == list(range(21))
    expected = np.concatenate([demo.embed(texts[i : i + 8]).vectors for i in range(0, 21, 8)])
    assert np.array_equal(np.array([each["embedding"] for each in data], np.float32), expected)


def test_documents_are_ranked_by_their_cosine(client: Client, vectors: np.ndarray) -> None:
    cosines = vectors[1:] @ vectors[0]
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]}
    results = client.post("/v1/rerank", body).json()["results"]
    assert [each["index"] for each in results] == np.argsort(-cosines).tolist()
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(cosines, reverse=True), abs=1e-3)
    (best,) = client.post("/rerank", {**body, "top_n": 1, "return_documents": True}).json()["results"]
    assert best["document"] == {"text": TEXTS[1 + best["index"]]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "give one of"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "give one of"),
        ("/tokenize", {"content": "a", "unknown": 1}, "unknown is not supported"),
        ("/detokenize", {"tokens": [10**6]}, "token"),
        ("/detokenize", {"tokens": [-1]}, "token"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/v1/embeddings", {"input": []}, "0 texts"),
        ("/v1/embeddings", {"input": ["a", ""]}, "without tokens"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2049 texts .accepted: 1 to 2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9999}, r"dimensions is 9999, but the model's vectors have \d+"),
        ("/v1/embeddings", {"input": ["a", "word " * 5000]}, r"\d+ tokens, but there is room for 2048"),
        ("/v1/embeddings", {"input": [10**6]}, "token"),
        ("/v1/rerank", {"query": "a", "documents": []}, None),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "without tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused(client: Client, path: str, body: Body, message: str | None) -> None:
    response = client.post(path, body)
    if message is None:
        assert (response.status_code, response.json()["results"]) == (200, [])
        return
    assert response.status_code == 400, response.text
    assert re.search(message, response.json()["error"]["message"]), response.text


@pytest.mark.parametrize("token", [-1, 10**5, 2**31, 2**63, -(10**12)])
def test_a_prompt_of_unknown_tokens_is_refused(client: Client, demo: slm.Model, token: int) -> None:
    response = client.post("/v1/completions", {"prompt": [1, token]})
    assert response.status_code == 400, response.text
    assert f"token {token} (accepted: 0 to {demo.vocab.size - 1})" in response.json()["error"]["message"]
    with pytest.raises(slm.errors.InvalidToken):
        demo.generate([1, token])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template", "/tokenize", "session"])
@pytest.mark.parametrize(
    "name", ["messages", "tools", "thinking", "add_generation_prompt", "continue_final_message", "self"]
)
def test_variables_of_the_template_that_other_parameters_set(client: Client, path: str, name: str) -> None:
    """Refused: otherwise the request would fail with an internal error."""
    if path == "session":
        path = f"/v1/sessions/{client.post('/v1/sessions', {}).json()['id']}/messages"
    refused = client.post(path, {"messages": QUESTION["messages"], "chat_template_kwargs": {name: 1}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "chat_template_kwargs", "invalid_value")
    assert error["message"].startswith(f"chat_template_kwargs has '{name}' (accepted: names other than ")


@pytest.mark.parametrize(
    ("path", "body", "slow"),
    [
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}, "render"),
        ("/tokenize", {"content": "x", "with_pieces": True}, "token_bytes"),
    ],
)
def test_long_work_is_not_done_in_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: Body, slow: str
) -> None:
    """Megabytes of messages or tokens take seconds, in which all other clients would wait."""
    client.post("/tokenize", {"content": "x"})  # loads the model
    (running,) = client.app.state.registry.running
    kind = type(running.model.formatter if slow == "render" else running.model.vocab)
    work, threads = getattr(kind, slow), set[threading.Thread]()

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return work(*arguments, **options)

    monkeypatch.setattr(kind, slow, noted)
    assert client.post(path, body).status_code == 200
    assert threads and threading.current_thread() not in threads

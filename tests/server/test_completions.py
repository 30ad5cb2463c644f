"""POST /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from server.conftest import Body, Client, frames
from slm_core.types import Pos

PROMPT = "What is"


def tokens_of(model: slm.Model) -> list[int]:
    return model.vocab.encode(PROMPT, add_special=True, parse_special=False)


def complete(client: Client, **fields: Any) -> list[Body]:
    """The choices of an answer."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, **fields}
    response = client.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choices: list[Body] = response.json()["choices"]
    return choices


def joined(client: Client, **fields: Any) -> list[Body]:
    """The choices of a stream's joined chunks."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, **fields, "stream": True}
    *chunks, done = frames(client.post("/v1/completions", body).text)
    assert done == "[DONE]"
    choices: dict[int, Body] = {}
    for chunk in chunks:
        (delta,) = json.loads(chunk)["choices"]
        choice = choices.setdefault(delta["index"], {**delta, "text": "", "logprobs": None, "token_ids": []})
        choice["text"] += delta["text"]
        choice["token_ids"] += delta.get("token_ids", [])
        choice["finish_reason"] = delta["finish_reason"]
        for name, values in (delta["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"][name] = [*choice["logprobs"].get(name, []), *values]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("as_tokens", [False, True])
def test_the_answer_is_the_engine_s(client: Client, demo: slm.Model, *, as_tokens: bool) -> None:
    expected = demo.generate(PROMPT, temperature=0, max_tokens=24, progress=False)
    prompt = tokens_of(demo) if as_tokens else PROMPT
    for choices in (complete(client, prompt=prompt), complete(client, prompt=[prompt]), joined(client, prompt=prompt)):
        (choice,) = choices
        assert (choice["text"], choice["finish_reason"]) == (expected.text, str(expected.finish_reason))


def test_answers_have_their_tokens_on_request(client: Client, demo: slm.Model) -> None:
    expected = demo.generate(PROMPT, temperature=0, max_tokens=24, progress=False)
    assert "token_ids" not in complete(client)[0]
    for choices in (complete(client, return_token_ids=True), joined(client, return_token_ids=True)):
        assert choices[0]["token_ids"] == list(expected.tokens)


def test_a_stream_of_several_answers_joins_to_the_whole_ones(client: Client) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": 2, "return_token_ids": True}
    whole, streamed = complete(client, **fields), joined(client, **fields)
    assert len({choice["text"] for choice in whole}) == 3
    assert [choice["token_ids"] for choice in streamed] == [choice["token_ids"] for choice in whole]
    for one, other in zip(whole, streamed, strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
        assert one["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]


def test_logprobs_are_those_of_the_tokens(client: Client, demo: slm.Model) -> None:
    (choice,) = complete(client, logprobs=3, return_token_ids=True)
    logprobs, tokens = choice["logprobs"], choice["token_ids"]
    assert logprobs["tokens"] == [demo.vocab.decode([token], special=True) for token in tokens]
    prompt = tokens_of(demo)
    with demo.new_context(n_ctx=256) as context:
        batch = context.new_batch()
        batch.extend([*prompt, *tokens], Pos(0, 0), logits="all")
        rows = context.decode(batch)[len(prompt) - 1 : -1].astype(np.float64)
    # Rows of one batch and of single tokens differ by the rounding of products, 0.03; those of wrong tokens by 1.
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert logprobs["token_logprobs"] == pytest.approx(rows[range(len(tokens)), tokens].tolist(), abs=0.2)
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 3 and top[token] == max(top.values()) == pytest.approx(logprob, abs=1e-5)


def test_the_best_of_several_answers(client: Client) -> None:
    fields = {"best_of": 4, "temperature": 1.0, "seed": 3, "logprobs": 0}
    (best,) = complete(client, **fields)
    ranked = complete(client, **{**fields, "best_of": 4, "n": 4})

    def mean(choice: Body) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    assert best["text"] == max(ranked, key=mean)["text"] == ranked[0]["text"]


def test_several_prompts_have_the_answers_of_each(client: Client) -> None:
    """Greedy, because sampled tokens may depend on the batch: its composition changes logits within the tolerance."""
    prompts, fields = [PROMPT, "My dog", "Rome"], {"n": 2, "temperature": 0, "return_token_ids": True}
    response = client.post("/v1/completions", {"prompt": prompts, "max_tokens": 8, **fields})
    choices, usage = response.json()["choices"], response.json()["usage"]
    assert [choice["index"] for choice in choices] == list(range(6))
    alone = [complete(client, prompt=prompt, max_tokens=8, **fields) for prompt in prompts]
    expected = [choice["token_ids"] for choices_alone in alone for choice in choices_alone]
    assert [choice["token_ids"] for choice in choices] == expected
    assert usage["completion_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_prompt_and_its_logprobs(
    client: Client, demo: slm.Model, max_tokens: int, *, as_tokens: bool
) -> None:
    text = 'The sum of 12 and 30 is 42. {"name": "Ada"}'
    tokens = demo.vocab.encode(text, add_special=True, parse_special=False)
    prompt = tokens if as_tokens else text
    (answer,) = complete(client, prompt=prompt, max_tokens=max(max_tokens, 1), logprobs=2)
    (choice,) = complete(client, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=2)
    assert choice["text"] == text + (answer["text"] if max_tokens else "")
    logprobs, expected = choice["logprobs"], demo.score(text, top=2)
    assert len(logprobs["tokens"]) == len(tokens) + max_tokens and logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]).startswith(text)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    values = logprobs["token_logprobs"][1 : len(tokens)]
    assert values == pytest.approx(expected.logprobs[1:], abs=1e-6)
    likeliest = [top[0][0] == token for top, token in zip(expected.top[1:], tokens[1:], strict=True)]
    tops = logprobs["top_logprobs"][1 : len(tokens)]
    assert [value == max(top.values()) for value, top in zip(values, tops, strict=True)] == likeliest
    assert any(likeliest) and not all(likeliest)


def test_an_echo_without_logprobs_is_the_text(client: Client) -> None:
    (answer,), (choice,) = complete(client), complete(client, echo=True)
    assert (choice["text"], choice["logprobs"]) == (PROMPT + answer["text"], None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"], "stream": True}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "echo": True, "stream": True}, "echo"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_what_is_refused(client: Client, fields: Body, param: str) -> None:
    response = client.post("/v1/completions", fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param

"""Chats and answers in files, and the log-probabilities of an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm

GREEDY = slm.Sampling(temperature=0, max_tokens=10)
SURE = slm.Sampling(temperature=0, max_tokens=10, logprobs=2)


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as loaded:
        yield loaded


def test_a_saved_chat_goes_on(model: slm.Model, tmp_path: Path) -> None:
    chat = model.chat(n_ctx=256, sampling=GREEDY)
    chat.send("My name is Ada.")
    chat.save(tmp_path / "chat.slm")
    twin = slm.Chat.load(model, tmp_path / "chat.slm")
    assert twin.messages == chat.messages
    assert twin.send("What is my name?").text == chat.send("What is my name?").text
    assert [path.name for path in tmp_path.iterdir()] == ["chat.slm"]


def test_a_file_that_cannot_be_used_is_one_line(model: slm.Model, tmp_path: Path) -> None:
    chat = model.chat(n_ctx=64)
    with pytest.raises(slm.InvalidOption, match="cannot be written: No such file"):
        chat.save(tmp_path / "absent" / "chat.slm")
    with pytest.raises(slm.InvalidOption, match="cannot be read: No such file"):
        slm.Chat.load(model, tmp_path / "chat.slm")
    (tmp_path / "chat.slm").write_bytes(b"no dump")
    with pytest.raises(slm.InvalidSnapshot):
        slm.Chat.load(model, tmp_path / "chat.slm")


def test_a_saved_answer_is_json_with_all_its_attributes(model: slm.Model, tmp_path: Path) -> None:
    def fail(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: The name of the city
        """
        raise KeyError(city)

    answer = model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0, max_tokens=60)).send(
        "What is the weather in Rome?", tools=[fail], tool_choice="fail"
    )
    answer.save(tmp_path / "answer.json")
    saved = json.loads((tmp_path / "answer.json").read_text())
    assert (saved["text"], saved["tokens"]) == (answer.text, list(answer.tokens))
    assert saved["finish_reason"] == answer.finish_reason.value
    assert saved["usage"]["completion_tokens"] == answer.usage.completion_tokens
    assert saved["results"][0]["error"].startswith("KeyError: ")
    assert saved["results"][0]["call"]["arguments"] == dict(answer.results[0].call.arguments)


@pytest.mark.parametrize("way", ["send", "session", "generate"])
def test_the_logprobs_of_an_answer_are_those_of_the_models_rows(model: slm.Model, way: str) -> None:
    session = model.session(n_ctx=256)
    session.append("The capital of France is")
    prompt = session.tokens
    if way == "session":
        answer = session.generate(SURE).run()
    elif way == "generate":
        answer = model.generate(list(prompt), SURE)
    else:
        chat = model.chat(n_ctx=256, sampling=SURE)
        answer = chat.send("What is 3 + 4?")
        prompt = chat.session.tokens[: answer.usage.prompt_tokens]
    assert answer.logprobs is not None
    assert [each.token for each in answer.logprobs] == list(answer.tokens)
    row_of = model.session(n_ctx=256)
    row_of.append_tokens(prompt)
    for each in answer.logprobs:
        row = row_of.next_logits()
        assert row is not None
        exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        assert each.logprob == pytest.approx(exact[each.token], abs=2e-3) and each.logprob <= 0
        assert each.top[0][0] == each.token, "greedy"
        assert all(value <= 0 and text == text_of(model, token) for token, text, value in each.top)
        assert each.text == text_of(model, each.token)
        row_of.append_tokens([each.token])


def text_of(model: slm.Model, token: int) -> str:
    return model.vocab.token_bytes(token, special=True).decode("utf-8", "replace")


def test_logprobs_are_not_kept_unless_they_are_asked_for(model: slm.Model) -> None:
    assert model.chat(n_ctx=256, sampling=GREEDY).send("Hello").logprobs is None


def test_a_certain_token_has_the_logprob_0() -> None:
    from slm_core.numerics import log_probability

    rng = np.random.default_rng(5)
    for _ in range(200):
        row = rng.normal(0, 1, 300).astype(np.float32)
        row[7] += rng.uniform(15, 30)
        assert log_probability(row, 7) <= 0.0
    assert math.isnan(log_probability(np.array([np.nan, 1.0], np.float32), 0))

"""``Model.generate``: one prompt or many, answered in order, with the same tokens as each prompt alone."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import slm_core as slm
from slm_core.engine.batch import LARGEST, UNLIMITED, n_ctx_for
from slm_core.engine.progressbar import ProgressBar
from slm_core.engine.prompts import EncodedPrompt
from slm_core.protocols import Vocab

GREEDY = slm.Sampling(temperature=0, max_tokens=10)
PROMPTS = ["My dog is called", "Once upon a time", "The capital of France is", "One, two, three,", "Rex is a"]


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path()) as loaded:
        yield loaded


def answer_alone(model: slm.Model, prompt: str, sampling: slm.Sampling = GREEDY) -> slm.Answer:
    with model.session() as session:
        session.append(prompt)
        return session.generate(sampling).run()


def test_a_list_of_prompts(model: slm.Model) -> None:
    answers = model.generate(PROMPTS, GREEDY)
    assert [answer.tokens for answer in answers] == [answer_alone(model, prompt).tokens for prompt in PROMPTS]


def test_sampled_tokens_are_the_same_as_alone(model: slm.Model) -> None:
    sampling = slm.Sampling(seed=11, max_tokens=10)
    answers = model.generate(PROMPTS, sampling, n_parallel=2)
    assert [answer.tokens for answer in answers] == [answer_alone(model, prompt, sampling).tokens for prompt in PROMPTS]


def test_one_prompt(model: slm.Model) -> None:
    assert model.generate(PROMPTS[0], GREEDY).text == answer_alone(model, PROMPTS[0]).text
    ids = model.vocab.encode(PROMPTS[0], add_special=True, parse_special=False)
    assert model.generate(ids, GREEDY).text == answer_alone(model, PROMPTS[0]).text


def test_messages_are_prompts(model: slm.Model) -> None:
    question = "My dog is called Rex. What is my dog called?"
    with model.chat(sampling=GREEDY) as chat:
        expected = chat.send(question)
    messages = [{"role": "user", "content": question}]
    assert model.generate(messages, GREEDY).text == expected.text
    assert [a.text for a in model.generate([messages, messages], GREEDY)] == [expected.text] * 2


def test_one_failure_keeps_the_other_answers(model: slm.Model) -> None:
    prompts = [PROMPTS[0], "too long " * 200, PROMPTS[1]]
    with pytest.raises(slm.RequestsFailed, match=r"1 of 3 .* prompt 1: ContextFull") as failed:
        model.generate(prompts, GREEDY, n_ctx=200)
    answers = failed.value.answers
    assert [None if a is None else a.tokens for a in answers] == [
        answer_alone(model, prompts[0]).tokens,
        None,
        answer_alone(model, prompts[2]).tokens,
    ]
    assert set(failed.value.errors) == {1}


def test_the_failure_of_a_single_prompt_is_raised_unchanged(model: slm.Model) -> None:
    with pytest.raises(slm.SlmError, match="context is full"):
        model.generate("too long " * 200, GREEDY, n_ctx=200)


@pytest.mark.parametrize(
    "bad", [None, 3, [None], [["a"]], [PROMPTS[0], 3], {"role": "user"}, b"Hello", [b"Hello"], bytearray(b"a"), b""]
)
def test_invalid_prompts_are_refused(model: slm.Model, bad: object) -> None:
    with pytest.raises(slm.InvalidOption, match="accepted: a text"):
        model.generate(bad)  # type: ignore[call-overload]


def test_an_unknown_option_is_an_error(model: slm.Model) -> None:
    with pytest.raises(slm.UnknownOption, match=r"'max_token'.*did you mean 'max_tokens'"):
        model.generate("a", max_token=3)  # type: ignore[call-overload]


def test_keywords_replace_options_of_the_sampling(model: slm.Model) -> None:
    keywords = {"max_tokens": 5, "temperature": 3.0, "top_p": 0.9, "seed": 11, "stop": "xyz"}
    sampling = slm.Sampling(max_tokens=5, temperature=3.0, top_p=0.9, seed=11, stop=("xyz",))
    expected = model.generate("My dog is", sampling)
    for base in (None, slm.Sampling(max_tokens=9, seed=4)):
        assert model.generate("My dog is", base, **keywords).tokens == expected.tokens  # type: ignore[call-overload]
    assert len(model.generate("My dog is", GREEDY, max_tokens=0).tokens) == 0
    with pytest.raises(slm.InvalidOption, match="temperature"):
        model.generate("My dog is", temperature=-1)


def test_no_prompts_give_no_answers(model: slm.Model) -> None:
    assert model.generate([]) == []


def test_a_timeout_ends_all_requests(model: slm.Model) -> None:
    endless = slm.Sampling(temperature=0, max_tokens=3000, logit_bias=dict.fromkeys(model.vocab.eog_ids, -1000000000.0))
    answers = model.generate(["a", "b"], endless, timeout=0.05)
    assert all(answer.timed_out for answer in answers)


class SlowVocab:
    """Takes longer to encode a text than ``SECONDS``."""

    SECONDS = 0.05

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def __getattr__(self, name: str) -> object:
        return getattr(self._vocab, name)

    def encode(self, text: str, **options: bool) -> list[int]:
        time.sleep(self.SECONDS)
        return self._vocab.encode(text, **options)


def test_the_timeout_counts_from_the_call(model: slm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that prompts take to encode is part of it, so no request has time left."""
    monkeypatch.setattr(model, "_vocab", SlowVocab(model.vocab))
    answers = model.generate(["a", "b"], GREEDY, timeout=SlowVocab.SECONDS)
    assert [(answer.timed_out, answer.tokens) for answer in answers] == [(True, ()), (True, ())]


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [([10**6], slm.InvalidToken, "prompt 1: token 1000000 "), ("", slm.InvalidOption, "prompt 1: a prompt without")],
)
def test_an_error_of_a_prompt_names_it(model: slm.Model, bad: Any, kind: type[slm.SlmError], message: str) -> None:
    with pytest.raises(kind, match=rf"^{message}"):
        model.generate(["a", bad, "c"], GREEDY)
    with pytest.raises(kind, match=rf"^{message.removeprefix('prompt 1: ')}"):
        model.generate(bad, GREEDY)


def test_n_ctx_fits_the_requests_that_run_together() -> None:
    prompts = [EncodedPrompt(range(n)) for n in (5, 100, 20)]
    assert n_ctx_for(prompts, 10, 2) == (100 + 11) + (20 + 11)
    assert n_ctx_for(prompts, None, 1) == 100 + UNLIMITED + 1
    assert n_ctx_for(prompts * 100, None, 200) == LARGEST
    assert n_ctx_for([EncodedPrompt(range(50_000))], 10, 16) == 50_011


def test_the_progress_bar_counts_answers(model: slm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class Recorded(ProgressBar):
        def __enter__(self) -> object:  # type: ignore[override]
            advance = super().__enter__()
            return lambda n: (counts.append(n), advance(n))

    monkeypatch.setattr("slm_core.engine.progressbar.ProgressBar", Recorded)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    model.generate(PROMPTS, GREEDY, progress=True)
    assert counts == sorted(counts)
    assert counts[-1] == 5 and len(set(counts)) > 1


def test_without_a_terminal_there_is_no_progress_bar(model: slm.Model, capfd: pytest.CaptureFixture[str]) -> None:
    model.generate(PROMPTS[:2], GREEDY)
    assert capfd.readouterr() == ("", "")

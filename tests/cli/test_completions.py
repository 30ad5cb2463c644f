"""``slm run`` with several answers, compared with the Python API."""

from __future__ import annotations

import json
import re

import pytest

import slm_core as slm

WARM = ("--backend", "native", "--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "4")
SAMPLING = slm.Sampling(temperature=3, top_k=0, top_p=1, min_p=0, seed=4, max_tokens=8, stop=("<|im_end|>",))


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native")


@pytest.fixture
def session(model):
    with model.chat(n_ctx=512) as chat, chat.scratch_branch("Hello!") as session:
        yield session


def test_completions_equal_the_api(run, session) -> None:
    sampling = slm.Sampling(**{**SAMPLING.to_dict(), "stop": ()})
    expected = [c.answer.text for c in session.completions(3, sampling, special=True).run()]
    outcome = run("run", "-p", "Hello!", *WARM, "--max-tokens", "8", "-n", "3", "--json")
    assert outcome.code == 0
    answers = json.loads(outcome.out)["answers"]
    assert [answer["text"] for answer in answers] == [text.removesuffix("<|im_end|>") for text in expected]
    for answer in answers:
        timings, n = answer["timings"], answer["usage"]["completion_tokens"]
        assert timings["tokens_per_second"] == pytest.approx((n - 1) / timings["decode_s"])
        assert timings["first_token_s"] == pytest.approx(timings["queue_s"] + timings["prefill_s"], abs=0.05)
    shown = run("run", "-p", "Hello!", *WARM, "--max-tokens", "8", "-n", "3", "--stats")
    assert len(re.findall(r"^\[\d, mean logprob -\d+\.\d+\]", shown.out, re.MULTILINE)) == 3
    assert "3: " in shown.err
    assert shown.err.count("the first after ") == 3


def test_best_of_keeps_the_likeliest(run) -> None:
    every = json.loads(run("run", "-p", "Hello!", *WARM, "--max-tokens", "8", "-n", "4", "--json").out)["answers"]
    best = json.loads(run("run", "-p", "Hello!", *WARM, "--max-tokens", "8", "--best-of", "4", "--json").out)["answers"]
    assert [best[0]["index"]] == [max(every, key=lambda answer: answer["mean_logprob"])["index"]]
    assert len(best) == 1


def test_beams_equal_the_api(run, session) -> None:
    expected = session.beam_search(slm.Beams(4, n_best=2, max_tokens=12), special=True)
    outcome = run(
        "run", "-p", "Hello!", "--backend", "native", "--beams", "4", "-n", "2", "--max-tokens", "12", "--json"
    )
    answers = json.loads(outcome.out)["answers"]
    assert [answer["score"] for answer in answers] == pytest.approx([h.score for h in expected.hypotheses], abs=1e-4)
    whole = json.loads(outcome.out)
    assert whole["usage"]["completion_tokens"] == sum(len(answer["logprobs"]) for answer in answers)
    timings = whole["timings"]
    assert timings["tokens_per_second"] == pytest.approx(whole["usage"]["completion_tokens"] / timings["decode_s"])
    raw = run("run", "-p", "The dog", "--raw", "--backend", "native", "--beams", "2", "--max-tokens", "5")
    assert raw.code == 0 and raw.out.startswith("[1, score -")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--beams", "4", "--temperature", "0.3"), "a beam search draws nothing: temperature"),
        (("--beams", "2", "-n", "3"), "n_best=3 (accepted: up to width, which is 2)"),
        (("--beams", "2", "--best-of", "3"), "--beams and --best-of do not go together"),
        (("-n", "3", "--best-of", "2"), "best_of=2 (accepted: an integer from 3 to 4096)"),
    ],
)
def test_incompatible_options_are_refused(run, options, message) -> None:
    outcome = run("run", "-p", "Hello!", "--backend", "native", *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert message in " ".join(outcome.err.split())

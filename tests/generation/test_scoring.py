"""Scores and log probabilities compared with a plain softmax over rows that are decoded token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripted import N_VOCAB, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import ContextFull, InvalidOption, InvalidToken
from slm_core.generation import scoring
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import Capability, EditLevel

# Rows are float32, with a relative rounding error of 6e-8 for logits below 100; sums are float64.
TOLERANCE = 1e-5


def session(level: EditLevel = EditLevel.CUT, *, shared: bool = True, **options: int) -> Session:
    shown = frozenset({Capability.SHARED_FORK, Capability.KV_PAYLOAD}) if shared else frozenset()
    return Session(ScriptedContext(level=level, capabilities=shown, **options), ByteVocab())


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - np.logaddexp.reduce(wide)


def expected(text: bytes, before: bytes = b"") -> list[float]:
    """The log probabilities of bytes, from rows that are decoded token by token."""
    s, logprobs = session(), []
    s.append_tokens(list(before))
    for token in text:
        logprobs.append(float(log_softmax(s.next_logits())[token]) if s.n_tokens else math.nan)
        s.append_tokens([token])
    return logprobs


def test_a_context_that_decodes_one_token_at_a_time_gives_the_same_score() -> None:
    logprobs = session(n_batch=1).score("It is a truth").logprobs
    np.testing.assert_allclose(logprobs, expected(b"It is a truth"), atol=TOLERANCE)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("before", [b"", b"It is a truth"])
def test_a_score_is_the_sum_of_log_softmax_and_changes_nothing(level: EditLevel, shared: bool, before: bytes) -> None:
    s, text = session(level, shared=shared), b" universally acknowledged, that a single man"
    if before:
        s.append_tokens(list(before))
    row = s.next_logits().copy() if before else None
    n_decoded = s.n_tokens - s.n_pending
    score = s.score(text.decode())
    assert score.tokens == tuple(text)
    np.testing.assert_allclose(score.logprobs, expected(text, before), atol=TOLERANCE)
    known = [logprob for logprob in expected(text, before) if not math.isnan(logprob)]
    assert score.n_scored == len(known) == len(text) - (not before)
    assert score.total == pytest.approx(sum(known), abs=TOLERANCE * len(text))
    assert score.perplexity == pytest.approx(math.exp(-sum(known) / len(known)), rel=1e-4)
    assert (s.tokens, s.n_tokens - s.n_pending) == (tuple(before), n_decoded)
    if row is not None:
        assert np.array_equal(s.next_logits(), row)


@pytest.mark.parametrize("before", [b"", b"It is"])
def test_the_top_tokens_of_each_position(before: bytes) -> None:
    s, twin, text = session(n_batch=5), session(), b" a truth universally"
    for each in (s, twin):
        each.append_tokens(list(before))
    score = s.score(list(text), top=3)
    assert score.logprobs == s.score(list(text)).logprobs and not s.score(list(text)).top
    for token, places in zip(text, score.top, strict=True):
        if twin.n_tokens:
            model_logprobs = log_softmax(twin.next_logits())
            best = np.argsort(-model_logprobs, kind="stable")[:3]
            assert [place for place, _ in places] == best.tolist()
            np.testing.assert_allclose([logprob for _, logprob in places], model_logprobs[best], atol=TOLERANCE)
        else:
            assert places == ()
        twin.append_tokens([token])


@pytest.mark.parametrize("top", [-1, 1001, 1.0, True])
def test_the_number_of_top_tokens_is_checked(top: object) -> None:
    with pytest.raises(InvalidOption, match="top="):
        session().score("x", top=top)


def test_scores_do_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a text that takes several batches"
    whole = session(n_batch=64).score(text)
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 3 * N_VOCAB)
    monkeypatch.setattr(scoring, "_FIRST_BATCH", 2)
    np.testing.assert_allclose(session(n_batch=5).score(text).logprobs, whole.logprobs, atol=TOLERANCE)


def test_tokens_are_scored_like_text() -> None:
    s = session()
    s.append("x")
    assert s.score(list(b"yz")) == s.score("yz")
    assert (s.score([]).logprobs, s.score("").total) == ((), 0.0)
    assert math.isnan(s.score([]).perplexity)


@pytest.mark.parametrize(
    ("logprob", "perplexity"), [(-705.0, math.exp(705.0)), (-1e5, math.inf), (-math.inf, math.inf)]
)
def test_the_perplexity_of_a_text_that_is_all_but_impossible(logprob: float, perplexity: float) -> None:
    assert scoring.Score((7,), (logprob,)).perplexity == perplexity


@pytest.mark.parametrize("shared", [True, False])
def test_a_failed_score_changes_nothing(shared: bool) -> None:
    s = session(n_ctx=40, shared=shared)
    s.append("0123456789")
    row = s.next_logits().copy()
    with pytest.raises(InvalidToken):
        s.score([*b"abcdefghijklmnopqrstu", N_VOCAB])
    with pytest.raises(ContextFull):
        s.score("x" * 35)
    assert s.context.length(s.seq_id) == 10
    assert np.array_equal(s.next_logits(), row)
    assert s.context.n_free == 30


@pytest.mark.parametrize("n", [0, 1, 4])
def test_events_have_the_top_tokens_before_and_after_the_chain(n: int) -> None:
    sampling = Sampling(seed=3, temperature=1.7, top_k=6, top_p=1.0, min_p=0.0, max_tokens=5, logprobs=n)
    s, twin = session(), session()
    for each in (s, twin):
        each.append("abc")
    for event in s.generate(sampling):
        row = twin.next_logits()
        model = log_softmax(row)
        best = np.argsort(-model, kind="stable")
        drawn = log_softmax(row[best[:6]] / 1.7)
        assert event.logprob == pytest.approx(model[event.token], abs=TOLERANCE)
        assert event.logprobs.chosen == pytest.approx(drawn[best[:6].tolist().index(event.token)], abs=TOLERANCE)
        for top_logprobs, expected_logprobs in (
            (event.logprobs.model, model[best[:n]]),
            (event.logprobs.sampled, drawn[:n]),
        ):
            assert [token for token, _ in top_logprobs] == best[:n].tolist()
            np.testing.assert_allclose([logprob for _, logprob in top_logprobs], expected_logprobs, atol=TOLERANCE)
        twin.append_tokens([event.token])


def test_without_logprobs_events_have_none() -> None:
    s = session()
    s.append("abc")
    assert all(event.logprobs is None for event in s.generate(Sampling(temperature=0, max_tokens=2)))


def test_a_forced_banned_token_has_no_probability_after_the_chain() -> None:
    from slm_core.generation.logprobs import logprobs_of

    row = np.array([2.0, 1.0, 0.0], np.float32)
    chain = SamplerChain(Sampling.preset("neutral", banned_tokens=[0], logprobs=2))
    assert logprobs_of(chain, row, 1).sampled == (), "no token was sampled yet"
    chain.distribution(row)
    logprobs = logprobs_of(chain, row, 0)
    assert (logprobs.chosen, [token for token, _ in logprobs.model], [token for token, _ in logprobs.sampled]) == (
        -math.inf,
        [0, 1],
        [1, 2],
    )


def test_min_tokens_of_a_paused_answer_counts_on_after_a_dump() -> None:
    """Tokens generated before the dump count."""
    from slm_core.generation import StoppingAction

    s = Session(ScriptedContext(lambda data: 257), ByteVocab())  # without min_tokens the answer would end at once
    s.append("abc")
    options = Sampling(temperature=0, min_tokens=6, max_tokens=20)
    paused = s.generate(
        options,
        stopping_criteria=[lambda e, draft: StoppingAction.PAUSE if len(draft.tokens) == 4 else StoppingAction.NEXT],
    )
    list(paused)
    twin = Session.restore(ScriptedContext(lambda data: 257), ByteVocab(), s.dump())
    assert len(twin.generate(stopping_criteria=()).run().tokens) == 7, "six tokens and EOG"


@pytest.mark.parametrize("n_ctx", [1, 2, 10, 11, 43, 44, 200])
def test_a_text_longer_than_the_context_is_scored_in_windows(n_ctx: int) -> None:
    """Each token is scored after at least half a context of text."""
    text = b"It is a truth universally acknowledged, that"
    logprobs = scoring.score_windows(ScriptedContext(n_ctx=n_ctx), list(text)).logprobs
    assert len(logprobs) == len(text)
    tops = scoring.score_windows(ScriptedContext(n_ctx=n_ctx), list(text), top=N_VOCAB).top
    assert isinstance(tops, tuple)
    assert [dict(places).get(token, math.nan) for places, token in zip(tops, text, strict=True)] == pytest.approx(
        list(logprobs), nan_ok=True
    ), "the top tokens of each position come from the window of its token"
    half = n_ctx // 2
    for i, logprob in enumerate(logprobs):
        window = i - (i - n_ctx) % (n_ctx - half) - half if i >= n_ctx else 0
        assert i < n_ctx or i - window >= half
        exact = expected(text[window : i + 1])[-1]
        assert logprob == pytest.approx(exact, abs=TOLERANCE, nan_ok=True)

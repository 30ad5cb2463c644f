"""Beam search equals transformers on the same logits; a refusal or a failure leaves the session unchanged."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.torch_context import N_VOCAB, LetterVocab, TorchContext, make_model
from slm_core.chat import Session
from slm_core.errors import ContextFull, DecodeFailed, InvalidOption, InvalidSequence, SamplingError
from slm_core.generation import BeamAnswer, Beams, FinishReason
from slm_core.protocols import Forward, Stop
from slm_core.types import EditLevel

PROMPT = [3, 17, 5, 30, 9]


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_model()


def session_of(model: Any, eog: tuple[int, ...] = (), prompt: list[int] = PROMPT, **options: Any) -> Session:
    session = Session(TorchContext(model, **options), LetterVocab(eog))
    session.append_tokens(prompt)
    return session


def search_by_transformers(
    model: Any, width: int, eog: tuple[int, ...], prompt: list[int] = PROMPT, **options: Any
) -> Any:
    import torch

    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        eos_token_id=list(eog) or None,
        pad_token_id=N_VOCAB,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return [row[len(prompt) :].tolist() for row in output.sequences], output.sequences_scores.tolist()


def assert_equal_to_transformers(answer: BeamAnswer, expected: tuple[list[list[int]], list[float]]) -> None:
    """Assert that token ids, except the padding of transformers, and scores are equal.

    Both sum up to 12 log probabilities of float32 logits below 100. Each rounding error is at most 1e-5.
    """
    sequences, scores = expected
    for hypothesis, padded in zip(answer.hypotheses, sequences, strict=True):
        n = len(hypothesis.tokens)
        assert list(hypothesis.tokens) == padded[:n]
        assert set(padded[n:]) <= {N_VOCAB}
    assert [h.score for h in answer.hypotheses] == pytest.approx(scores, abs=2e-4)


OPTIONS = [
    (width, penalty, early, eog)
    for width, penalty, early, eog in itertools.product(
        (1, 2, 4), (-0.7, 0.0, 1.0, 2.5), (False, True, "never"), ((), (11,), (2, 11, 20, 33))
    )
    if width > 1  # with one beam, transformers runs greedy search without scores
]


@pytest.mark.parametrize(("width", "penalty", "early", "eog"), OPTIONS)
def test_search_equals_transformers(model, width, penalty, early, eog) -> None:
    biases = dict.fromkeys(eog, 4.0)  # EOG comes early enough that early stopping makes a difference
    for prompt, bias in ((PROMPT, {}), (PROMPT, biases), ([1, 1, 8], biases), ([25, 4, 13, 13], biases)):
        beams = Beams(width, n_best=width, length_penalty=penalty, early_stopping=early, max_tokens=9, logit_bias=bias)
        expected = search_by_transformers(
            model,
            width,
            eog,
            prompt,
            max_new_tokens=9,
            length_penalty=penalty,
            early_stopping=early,
            sequence_bias=[[[token], value] for token, value in bias.items()] or None,
        )
        assert_equal_to_transformers(session_of(model, eog, prompt).beam_search(beams), expected)


def test_one_beam_is_greedy(model) -> None:
    session, tokens = session_of(model), list(PROMPT)
    answer = session.beam_search(Beams(1, max_tokens=6))
    other = TorchContext(model)
    for token in answer.best.tokens:
        row = rows_of(other, tokens)
        assert token == int(row.argmax())
        tokens.append(token)


def rows_of(context: TorchContext, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return context.model(torch.tensor([tokens])).logits[0, -1].numpy().astype(np.float64)


def test_min_tokens_and_biases_equal_transformers(model) -> None:
    biases = {4: 3.0, 11: 2.0, 19: -5.0, 30: float("-inf")}
    answer = session_of(model, (11,)).beam_search(
        Beams(3, n_best=3, max_tokens=9, min_tokens=4, logit_bias=biases, length_penalty=0.5)
    )
    expected = search_by_transformers(
        model,
        3,
        (11,),
        max_new_tokens=9,
        min_new_tokens=4,
        length_penalty=0.5,
        sequence_bias=[[[token], bias] for token, bias in biases.items()],
    )
    assert_equal_to_transformers(answer, expected)
    assert all(11 not in h.tokens[:4] and 30 not in h.tokens for h in answer.hypotheses)


class IncreasingTokens:
    """A constraint: each token is larger than the one before; it is complete when no larger token exists."""

    def __init__(self, last: int = -1) -> None:
        self.last = last

    @property
    def is_complete(self) -> bool:
        return self.last >= N_VOCAB - 1

    def mask(self, logits):
        row = logits.copy()
        row[: self.last + 1] = -np.inf
        return row

    def advance(self, token):
        assert token > self.last
        self.last = token
        return Stop() if self.is_complete else Forward()

    def clone(self):
        return IncreasingTokens(self.last)

    def state(self) -> bytes:
        return b""


def test_a_constraint_equals_transformers(model) -> None:
    def allowed(batch: int, ids: Any) -> list[int]:
        generated = ids[len(PROMPT) :].tolist()
        return list(range(max(generated, default=-1) + 1, N_VOCAB))

    constraint = IncreasingTokens()
    answer = session_of(model).beam_search(Beams(4, n_best=4, max_tokens=6), constraint=constraint)
    expected = search_by_transformers(model, 4, (N_VOCAB - 1,), max_new_tokens=6, prefix_allowed_tokens_fn=allowed)
    assert_equal_to_transformers(answer, expected)
    assert constraint.last == -1, "the caller's constraint has advanced"
    reasons = {h.finish_reason for h in answer.hypotheses}
    assert reasons == {
        FinishReason.CONSTRAINT if h.tokens[-1] == N_VOCAB - 1 else FinishReason.LENGTH for h in answer.hypotheses
    }


Scored = tuple[float, tuple[int, ...]]


def diverse_beam_search(
    context: TorchContext, width: int, n_groups: int, strength: float, n_steps: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Diverse beam search of the paper (arXiv 1610.02424, algorithm 1) with Hamming diversity and no EOG tokens."""
    size = width // n_groups
    groups: list[list[Scored]] = [[(0.0, ())] for _ in range(n_groups)]
    for _ in range(n_steps):
        n_chosen: Counter[int] = Counter()
        for g, group in enumerate(groups):
            candidates = []
            for score, tokens in group:
                row = rows_of(context, [*PROMPT, *tokens])
                logp = row - np.log(np.exp(row - row.max()).sum()) - row.max()
                candidates += [
                    (score + logp[token] - strength * n_chosen[token], (*tokens, token)) for token in range(N_VOCAB)
                ]
            groups[g] = sorted(candidates, reverse=True)[:size]
            n_chosen.update(tokens[-1] for _, tokens in groups[g])
    return sorted((hypothesis for group in groups for hypothesis in group), reverse=True)


@pytest.mark.parametrize(("width", "n_groups", "strength"), [(4, 2, 0.8), (6, 3, 2.0), (4, 4, 100.0)])
def test_diverse_groups_equal_the_paper(model, width, n_groups, strength) -> None:
    options = Beams(
        width, n_best=width, n_groups=n_groups, diversity_penalty=strength, max_tokens=5, length_penalty=0.0
    )
    answer = session_of(model).beam_search(options)
    expected = diverse_beam_search(TorchContext(model), width, n_groups, strength, 5)
    assert [h.tokens for h in answer.hypotheses] == [tokens for _, tokens in expected]
    assert [h.score for h in answer.hypotheses] == pytest.approx([score for score, _ in expected], abs=2e-4)


def test_a_beam_of_full_width_finds_the_best_sequence(model) -> None:
    context = TorchContext(model)

    @cache
    def logprobs_after(*tokens: int) -> np.ndarray:
        row = rows_of(context, [*PROMPT, *tokens])
        return row - row.max() - np.log(np.exp(row - row.max()).sum())

    def total(tokens: tuple[int, ...]) -> float:
        return float(sum(logprobs_after(*tokens[:i])[token] for i, token in enumerate(tokens)))

    session = session_of(model, n_seq_max=N_VOCAB + 1)
    answer = session.beam_search(Beams(N_VOCAB, max_tokens=2, length_penalty=0.0))
    best = max(itertools.product(range(N_VOCAB), repeat=2), key=total)
    assert answer.best.tokens == best
    assert answer.best.score == pytest.approx(total(best), abs=1e-4)
    assert sum(answer.best.logprobs) == pytest.approx(answer.best.score)


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("shared", [True, False])
def test_all_contexts_find_the_same_hypotheses(model, level, shared) -> None:
    options = Beams(4, n_best=4, max_tokens=8)
    expected = session_of(model, (11,)).beam_search(options)
    capabilities = TorchContext(model).capabilities if shared else frozenset()
    session = session_of(model, (11,), level=level, capabilities=capabilities, n_batch=3, n_seq_max=5)
    actual = session.beam_search(options)
    assert [h.tokens for h in actual.hypotheses] == [h.tokens for h in expected.hypotheses]
    # Batches of other shapes may round differently.
    assert [h.score for h in actual.hypotheses] == pytest.approx([h.score for h in expected.hypotheses], abs=1e-4)
    assert session.context.n_free == 2000 - len(PROMPT)
    assert [session.context.length(s) for s in range(5)] == [len(PROMPT), 0, 0, 0, 0]


def test_all_beams_are_one_batch_and_no_token_is_decoded_twice(model) -> None:
    session = session_of(model)
    session.beam_search(Beams(4, max_tokens=8, early_stopping=True))
    assert session.context.batches == [len(PROMPT), *[4] * 7]
    session.beam_search(Beams(2, max_tokens=3))
    assert session.context.batches[8:] == [2, 2], "the prompt is not decoded again"


def test_the_session_continues_as_without_a_search(model) -> None:
    session, other = session_of(model), session_of(model)
    before = session.next_logits().copy()
    answer = session.beam_search(Beams(3, max_tokens=5))
    assert (session.tokens, session.n_pending) == (tuple(PROMPT), 0)
    np.testing.assert_array_equal(session.next_logits(), before)
    session.append_tokens(answer.best.tokens)
    other.append_tokens(answer.best.tokens)
    np.testing.assert_allclose(session.next_logits(), other.next_logits(), atol=1e-5)


@pytest.mark.parametrize("failing", range(6))
def test_a_failure_leaves_the_session_unchanged(model, failing) -> None:
    session = session_of(model)
    context = session.context
    context.fails_at = failing
    with pytest.raises(DecodeFailed):
        session.beam_search(Beams(3, max_tokens=8))
    n_tokens = len(PROMPT) if failing else 0
    assert [context.length(s) for s in range(16)] == [n_tokens] + [0] * 15
    expected = session_of(model).beam_search(Beams(15, n_best=3, max_tokens=8))
    assert session.beam_search(Beams(15, n_best=3, max_tokens=8)).hypotheses == expected.hypotheses


def test_too_few_sequences_are_refused(model) -> None:
    session = session_of(model, n_seq_max=4)
    with pytest.raises(InvalidSequence, match=r"width 5 takes 5 free sequences, there are 3.*n_seq_max=6"):
        session.beam_search(Beams(5))
    assert session.context.batches == [], "the search is refused before the prompt is decoded"


def test_a_full_context_ends_a_begun_search(model) -> None:
    # 5 prompt tokens and 3 steps of 4 beams take 17 positions; forks that share storage may need fewer.
    session = session_of(model, n_ctx=18, capabilities=frozenset())
    with pytest.raises(ContextFull):
        session.beam_search(Beams(4, max_tokens=8))
    assert [session.context.length(s) for s in range(3)] == [5, 0, 0]
    shared = session_of(model, n_ctx=18)
    answer = shared.beam_search(Beams(4, n_best=4, max_tokens=30))
    assert {h.finish_reason for h in answer.hypotheses} == {FinishReason.LENGTH}
    assert 3 <= len(answer.best.tokens) < 30
    assert shared.context.n_free == 18 - 5


def test_a_cancelled_search_returns_its_hypotheses(model) -> None:
    session, n_calls = session_of(model), itertools.count()
    answer = session.beam_search(Beams(3, n_best=3, max_tokens=9), cancelled=lambda: next(n_calls) >= 3)
    assert {(len(h.tokens), h.finish_reason) for h in answer.hypotheses} == {(3, FinishReason.CANCELLED)}
    assert session_of(model).beam_search(cancelled=lambda: True).hypotheses == ()


def test_stop_strings_end_a_hypothesis_and_are_removed(model) -> None:
    free = session_of(model).beam_search(Beams(4, n_best=4, max_tokens=8))
    stop = free.best.text[2:4]
    answer = session_of(model).beam_search(Beams(4, n_best=4, max_tokens=8, stop=stop))
    ended = [h for h in answer.hypotheses if h.finish_reason is FinishReason.STOP]
    assert ended and all(LetterVocab().decode(h.tokens) == h.text + stop for h in ended)
    assert all(stop not in h.text for h in answer.hypotheses)


WORDS = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda ids: LetterVocab().decode(ids)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(words=WORDS, width=st.integers(1, 6), slack=st.integers(0, 4), early=st.sampled_from([True, False, "never"]))
def test_every_hypothesis_contains_the_words(model, words, width, slack, early) -> None:
    n = sum(map(len, set(words))) + slack
    session = session_of(model, (11, 12))
    answer = session.beam_search(
        Beams(width, n_best=width, max_tokens=n, force_words=tuple(set(words)), early_stopping=early)
    )
    assert answer.hypotheses
    for hypothesis in answer.hypotheses:
        assert all(word in hypothesis.text for word in words), f"{hypothesis.text!r} lacks one of {words}"
        assert len(hypothesis.tokens) <= n


def test_forced_words_equal_an_exhaustive_search(model) -> None:
    word = LetterVocab().decode([7, 2])
    answer = session_of(model, n_seq_max=N_VOCAB + 1).beam_search(
        Beams(N_VOCAB, max_tokens=3, force_words=word, length_penalty=0.0)
    )
    context, best = TorchContext(model), (-np.inf, ())
    for tokens in [(7, 2, x) for x in range(N_VOCAB)] + [(x, 7, 2) for x in range(N_VOCAB)]:
        total = 0.0
        for i, token in enumerate(tokens):
            row = rows_of(context, [*PROMPT, *tokens[:i]])
            total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        best = max(best, (total, tokens))
    assert answer.best.tokens == best[1]
    assert answer.best.score == pytest.approx(best[0], abs=1e-4)


def test_incompatible_options_are_refused(model) -> None:
    session = session_of(model)
    with pytest.raises(SamplingError, match="exclude each other"):
        session.beam_search(Beams(2, max_tokens=4, force_words="77"), constraint=IncreasingTokens())
    with pytest.raises(InvalidOption, match=r"take 3 tokens \(accepted: up to max_tokens, 2\)"):
        session.beam_search(Beams(2, max_tokens=2, force_words="123"))
    with pytest.raises(InvalidOption, match=r"token 99 \(accepted: 0 to 36\)"):
        session.beam_search(Beams(2, logit_bias={99: 1.0}))
    assert [session.context.length(s) for s in (0, 1, 2)] == [len(PROMPT), 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width=0 .accepted: an integer from 1 on"),
        ({"width": True}, "width=True"),
        ({"width": 2, "n_best": 3}, "n_best=3 .accepted: up to width, which is 2"),
        ({"early_stopping": "maybe"}, "early_stopping='maybe' .accepted: True, False, 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"n_groups": 3, "diversity_penalty": 1.0}, "n_groups=3 does not divide width=4"),
        ({"n_groups": 2}, "groups need a penalty"),
        ({"diversity_penalty": 1.0}, "a penalty needs groups"),
        ({"n_groups": 2, "diversity_penalty": 1.0, "force_words": "a"}, "do not go together"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"stop": ("",)}, "not empty"),
        ({"force_words": ("a", "")}, "not empty"),
        ({"logit_bias": {-1: 0.5}}, "a token of logit_bias=-1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias.1.=inf"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Beams(**options)


ALL_OF_4: dict[str, Any] = {"width": 4, "n_best": 4, "max_tokens": 12}
SHORT: dict[str, Any] = {"width": 2, "n_best": 2, "max_tokens": 12, "length_penalty": 0.0}
ENDING: dict[str, Any] = {**ALL_OF_4, "logit_bias": {11: 4.0, 20: 4.0}}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "width": ({"width": 1, "max_tokens": 12}, {"width": 7, "max_tokens": 12}),
    "n_best": ({**ALL_OF_4, "n_best": 1}, {**ALL_OF_4, "n_best": 3}),
    "length_penalty": (ALL_OF_4, {**ALL_OF_4, "length_penalty": -3.0}),
    "early_stopping": (ENDING, {**ENDING, "early_stopping": True}),
    "n_groups": (ALL_OF_4, {**ALL_OF_4, "n_groups": 4, "diversity_penalty": 3.0}),
    "diversity_penalty": (
        {**ALL_OF_4, "n_groups": 2, "diversity_penalty": 0.5},
        {**ALL_OF_4, "n_groups": 2, "diversity_penalty": 9.0},
    ),
    "max_tokens": (ALL_OF_4, {**ALL_OF_4, "max_tokens": 4}),
    "min_tokens": (SHORT, {**SHORT, "min_tokens": 7}),
    "stop": (ALL_OF_4, {**ALL_OF_4, "stop": "0L"}),
    "logit_bias": (ALL_OF_4, {**ALL_OF_4, "logit_bias": {5: 6.0}}),
    "force_words": (ALL_OF_4, {**ALL_OF_4, "force_words": "78"}),
}
"""For each option, two searches that differ only in this option and in the options that it requires."""


@pytest.mark.parametrize("name", [field.name for field in fields(Beams)])
def test_every_option_changes_the_result(model, name) -> None:
    session = session_of(model, (2, 11, 20, 33))
    first, second = (session.beam_search(Beams(**options)).hypotheses for options in DIFFERENT[name])
    assert first != second

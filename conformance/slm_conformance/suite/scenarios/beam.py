"""Beam search over the backend's forks: hypotheses, scores, and no trace in the session."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slm_conformance.suite.bench import Bench, contents_of, log_softmax
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import next_row
from slm_conformance.suite.scripted import CancelsAfter
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.errors import ContextFull, InvalidOption, InvalidSequence, SamplingError
from slm_core.generation import BeamAnswer, Beams, FinishReason
from slm_core.types import Capability

N_PROMPT = 20
WIDTH = 4
N_TOKENS = 6
BIAS = 500.0
"""With this bias a token is likelier than all tokens without one, whatever the logits."""

LIMITS: Mapping[str, tuple[Mapping[str, Any], Sequence[object], Sequence[object]]] = {
    "width": ({}, (1, 40), (0, -1, True, 1.0)),
    "n_best": ({"width": 3}, (1, 3), (0, 4, True)),
    "length_penalty": ({}, (-2, 0.0, 2.5), (math.inf, math.nan, "1", True)),
    "early_stopping": ({}, (True, False, "never"), ("always", None)),
    "n_groups": ({"diversity_penalty": 0.5}, (2, 4), (0, 1, 3)),
    "diversity_penalty": ({"n_groups": 2}, (0.1, 3), (0, -1, math.inf, math.nan)),
    "max_tokens": ({}, (1,), (0, None)),
    "min_tokens": ({"max_tokens": 8}, (0, 8), (-1, 9)),
    "stop": ({}, ("x", ["x", "y"], ()), (("",), [1])),
    "logit_bias": ({}, ({0: -math.inf, 3: 2},), ({-1: 1.0}, {True: 1.0}, {0: math.inf}, {0: math.nan}, {"1": 1.0})),
    "force_words": ({}, ("x", ["x", "y"], ()), (("",), [1])),
}
"""For each option: other options that it needs, values that are accepted, and values that are refused."""


class TestBeam(Scenarios):
    """Beam search: beams are forks that are decoded together at every edit level; the session does not change."""

    above_contract = True

    def test_log_probabilities(self, bench: Bench) -> None:
        """Generation: the log probability of each token of a hypothesis follows from the tokens before it."""
        hypotheses = _session(bench).beam_search(Beams(WIDTH, n_best=WIDTH, max_tokens=N_TOKENS)).hypotheses
        for i, hypothesis in enumerate(hypotheses):
            prompt = bench.tokens(N_PROMPT)
            bench.log_probabilities_agree(prompt, hypothesis.tokens, hypothesis.logprobs, f"hypothesis {i}")

    def test_one_beam_is_greedy(self, bench: Bench) -> None:
        """Generation: a single beam takes the largest logit at each step."""
        best = _session(bench).beam_search(Beams(1, max_tokens=N_TOKENS)).best
        bench.chosen(bench.tokens(N_PROMPT), best.tokens, "a search with a single beam")

    def test_n_best(self, bench: Bench) -> None:
        """Generation: hypotheses differ and come best first; a score is the mean log probability."""
        answer = _session(bench).beam_search(Beams(WIDTH, n_best=WIDTH, max_tokens=N_TOKENS))
        scores = [hypothesis.score for hypothesis in answer.hypotheses]
        assert len({hypothesis.tokens for hypothesis in answer.hypotheses}) == WIDTH, "two hypotheses are the same"
        assert scores == sorted(scores, reverse=True), f"the scores {scores} are not in order"
        means = [float(np.mean(hypothesis.logprobs)) for hypothesis in answer.hypotheses]
        assert np.allclose(scores, means, atol=1e-6), f"scores {scores}, mean log probabilities {means}"
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        expected = (N_PROMPT, sum(len(hypothesis.tokens) for hypothesis in answer.hypotheses))
        assert usage == expected, f"usage counts {usage} tokens of the prompt and the hypotheses, not {expected}"

    def test_two_steps_in_full(self, bench: Bench) -> None:
        """Generation: two textbook steps find the likeliest pair that begins with a likely token."""
        session = _session(bench)
        first = log_softmax(next_row(session))[0]
        beams = Beams(WIDTH, max_tokens=2, length_penalty=0.0, early_stopping="never")
        score = session.beam_search(beams).best.score
        pairs = []
        for token in np.argsort(-first)[:WIDTH].tolist():
            row = log_softmax(bench.feed(bench.context(), [*bench.tokens(N_PROMPT), token])[-1:])[0]
            ended = token in bench.vocab.eog_ids
            pairs.append(first[token] if ended else first[token] + row.max())
        # Two log probabilities of two rows each; each may be off by two gaps (see Tolerance.gap).
        slack = 8 * bench.tolerance.gap * float(np.linalg.norm(next_row(session))) + 1e-4
        assert abs(score - max(pairs)) <= slack, (
            f"the best of {WIDTH} beams after two tokens scores {score:.4f}; by plain decode, the likeliest pair that"
            f" begins with one of the {WIDTH} likeliest tokens has {max(pairs):.4f} (allowed: {slack:.1e} apart)"
        )

    def test_no_trace(self, bench: Bench) -> None:
        """Generation: after a search, the context's tokens and the session's next logits are unchanged."""
        session = _session(bench)
        before, contents = next_row(session), contents_of(session.context)
        session.beam_search(Beams(WIDTH - 1, max_tokens=N_TOKENS))
        assert contents_of(session.context) == contents, "a beam search left something in the context"
        bench.same(next_row(session), before, "the next logits after a beam search")

    def test_decodes_the_prompt_once(self, bench: Bench) -> None:
        """Generation: beams share the prompt's positions; they copy the prompt only if forks are copies."""
        shared = Capability.SHARED_FORK in bench.capabilities
        needed = WIDTH * N_TOKENS + (N_PROMPT if shared else N_PROMPT * (WIDTH + 1))
        session = Session(bench.context(n_ctx=needed, n_seq_max=WIDTH + 1), bench.vocab)
        session.append_tokens(bench.tokens(N_PROMPT))
        result = session.beam_search(Beams(WIDTH, n_best=WIDTH, max_tokens=N_TOKENS, early_stopping="never"))
        for hypothesis in result.hypotheses:
            ended = hypothesis.tokens[-1] in bench.vocab.eog_ids
            assert ended or len(hypothesis.tokens) == N_TOKENS, (
                f"a search for {N_TOKENS} tokens in {needed} positions ended after {len(hypothesis.tokens)}"
            )

    def test_without_sequences(self, bench: Bench) -> None:
        """Generation: a search needs a free sequence per beam; otherwise it is refused with the number needed."""
        session = _session(bench)
        with bench.refused(f"width {WIDTH} in {WIDTH} sequences", InvalidSequence, context=session.context):
            session.beam_search(Beams(WIDTH + 1))

    def test_every_answer(self, bench: Bench) -> None:
        """Generation: a search as wide as the number of possible answers finds each, with its text, score and end."""
        (a, b), (text_a, text_b) = _two_letters(bench)
        letters, eog = {a: BIAS, b: BIAS}, min(bench.vocab.eog_ids)
        cases: tuple[tuple[Mapping[str, Any], Regex | None], ...] = (
            ({"logit_bias": {**letters, eog: BIAS}, "min_tokens": 2, "length_penalty": 0.5}, None),
            ({"logit_bias": letters, "stop": (text_a + text_b, text_a + text_a + text_a)}, None),
            ({"logit_bias": letters, "force_words": (text_a + text_b,), "length_penalty": -1.0}, None),
            ({"logit_bias": letters, "length_penalty": 0.0}, Regex(f"({text_a}|{text_b}){{2}}")),
        )
        for options, rule in cases:
            options = {"max_tokens": 3, "early_stopping": "never", **options}
            expected = {tokens: end for tokens, *end in _possible(bench, options, 2 if rule is not None else 3)}
            width = len(expected) * (2 if "force_words" in options else 1)  # some beams continue without the words
            session = _session(bench, n_ctx=512, n_seq_max=width + 1, n_batch=3)
            result = session.beam_search(Beams(width, n_best=len(expected), **options), constraint=rule)
            what = f"a search with {options}"
            answers = {
                hypothesis.tokens: [hypothesis.text, hypothesis.finish_reason] for hypothesis in result.hypotheses
            }
            assert answers == expected, f"{what} gives {answers}, not {expected}"
            _check_scores(result, options, what)

    def test_when_it_ends(self, bench: Bench) -> None:
        """Generation: a search ends as ``early_stopping`` says, where it is cancelled, or where there is no room."""
        (a, _), _ = _two_letters(bench)
        eog, nothing = min(bench.vocab.eog_ids), dict.fromkeys(range(bench.vocab.size), -math.inf)
        for early_stopping, bias, n_steps in (
            (True, {a: BIAS, eog: 300.0}, 2),
            (False, {a: BIAS, eog: 300.0}, 9),
            (False, {a: 300.0, eog: BIAS}, 2),
            (False, {a: -300.0, eog: -250.0}, 2),
            ("never", {a: -300.0, eog: -250.0}, 9),
            ("never", {a: 300.0, eog: BIAS}, 2),
        ):
            calls = CancelsAfter(math.inf)
            beams = Beams(2, n_best=2, max_tokens=9, logit_bias={**nothing, **bias}, early_stopping=early_stopping)  # type: ignore[arg-type]
            session = _session(bench)
            session.next_logits()
            session.beam_search(beams, cancelled=calls)
            assert calls.n_calls == n_steps, (
                f"with early_stopping={early_stopping} and biases {bias}, a search takes {calls.n_calls} steps,"
                f" not {n_steps}"
            )
        session = _session(bench)
        session.next_logits()
        cancelled = session.beam_search(Beams(2, n_best=2, logit_bias={a: BIAS}), cancelled=CancelsAfter(2))
        ends = [(hypothesis.finish_reason, len(hypothesis.tokens)) for hypothesis in cancelled.hypotheses]
        assert ends == [(FinishReason.CANCELLED, 3)] * 2, f"a search that is cancelled after three steps ends as {ends}"
        words = Beams(1, force_words=("zqxjk",), max_tokens=9)  # a word of several tokens, in every vocabulary
        none = session.beam_search(words, cancelled=CancelsAfter(0)).hypotheses
        assert none == (), f"a search that is cancelled before its first hypothesis has {none}"
        with bench.refused("a search in which no token may follow", SamplingError):
            _session(bench).beam_search(Beams(1, logit_bias=nothing))

    def test_in_a_full_context(self, bench: Bench) -> None:
        """Generation: a search that fills the context ends with ``length``; without room for a step, it is refused."""
        n_ctx = N_PROMPT + 4 if Capability.SHARED_FORK in bench.capabilities else 2 * N_PROMPT + 4
        session = Session(bench.context(n_ctx=n_ctx, n_seq_max=2), bench.vocab)
        session.append_tokens(bench.tokens(N_PROMPT))
        best = session.beam_search(Beams(1, max_tokens=4 * n_ctx, min_tokens=4 * n_ctx)).best
        assert best.finish_reason is FinishReason.LENGTH, f"a search in a full context ends with {best.finish_reason}"
        assert 5 <= len(best.tokens) < 4 * n_ctx, f"a search with room for 4 tokens has {len(best.tokens)}"
        session.append_tokens(bench.tokens(session.context.n_free, seed=1))
        session.next_logits()
        with bench.refused("a search without room", ContextFull, context=session.context):
            session.beam_search(Beams(1, min_tokens=4, max_tokens=4))

    def test_options(self, bench: Bench) -> None:
        """Generation: values within the limits of an option are accepted, others refused."""
        for option, (others, accepted, refused) in LIMITS.items():
            for value in accepted:
                Beams(**{**others, option: value})
            for value in refused:
                with bench.refused(f"{option}={value!r}", InvalidOption):
                    Beams(**{**others, option: value})
        biases = {3: 1.0}
        beams = Beams(logit_bias=biases)
        biases[4] = 2.0
        assert beams.logit_bias == {3: 1.0}, f"the options of a search changed to {beams.logit_bias}"
        one = Beams(stop="xy", force_words="yz")  # type: ignore[arg-type]  # a text alone is taken, too
        assert (one.stop, one.force_words) == (("xy",), ("yz",)), f"a text of its own is {one.stop}, {one.force_words}"
        with bench.refused("forced words with groups", InvalidOption):
            Beams(4, n_groups=2, diversity_penalty=1.0, force_words=("x",))
        for options in (
            {"logit_bias": {bench.vocab.size: 1.0}},
            {"force_words": ("abcdefgh",), "max_tokens": 2},
        ):
            with bench.refused(f"a search with {options}", InvalidOption):
                _session(bench).beam_search(Beams(**options))

    def test_forced_words(self, bench: Bench) -> None:
        """Generation: every hypothesis contains the forced words."""
        words = ("the", "dog")
        answer = _session(bench).beam_search(Beams(WIDTH, n_best=WIDTH, max_tokens=12, force_words=words))
        for hypothesis in answer.hypotheses:
            assert all(word in hypothesis.text for word in words), f"{hypothesis.text!r} lacks one of {words}"

    def test_groups_differ(self, bench: Bench) -> None:
        """Generation: with a large diversity penalty, groups choose different tokens at each step."""
        # An EOG token would not be avoided: a group whose hypothesis ends continues without it.
        beams = Beams(
            WIDTH,
            n_best=WIDTH,
            n_groups=WIDTH,
            diversity_penalty=1e4,
            min_tokens=N_TOKENS,
            max_tokens=N_TOKENS,
        )
        tokens = [hypothesis.tokens for hypothesis in _session(bench).beam_search(beams).hypotheses]
        for step in zip(*tokens, strict=False):
            assert len(set(step)) == len(step), f"groups that exclude each other chose {step} at one step"

    def test_limits(self, bench: Bench) -> None:
        """Generation: a hypothesis ends at ``max_tokens``, or at an EOG token after ``min_tokens``."""
        eog = min(bench.vocab.eog_ids)
        beams = Beams(WIDTH, n_best=WIDTH, min_tokens=3, max_tokens=N_TOKENS, logit_bias={eog: 1e4})
        for hypothesis in _session(bench).beam_search(beams).hypotheses:
            assert len(hypothesis.tokens) == 4, (
                f"the end has all the bias from token 4 on, but a hypothesis has {len(hypothesis.tokens)} tokens"
            )
            assert (hypothesis.tokens[-1], hypothesis.finish_reason) == (eog, FinishReason.STOP)


def _session(bench: Bench, n_ctx: int = 256, n_seq_max: int = WIDTH + 1, n_batch: int = 64) -> Session:
    session = Session(bench.context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session


def _two_letters(bench: Bench) -> tuple[tuple[int, int], tuple[str, str]]:
    """Two tokens of one letter that stay two tokens in a row, in any order, and their texts."""
    vocab = bench.vocab
    tokens = [vocab.encode(letter, add_special=False, parse_special=False)[-1] for letter in "abcdefghij"]
    texts = [vocab.decode([token]) for token in tokens]
    for i, j in itertools.permutations(range(len(texts)), 2):
        joined = vocab.encode(texts[i] + texts[j], add_special=False, parse_special=False)
        if joined == [tokens[i], tokens[j]]:
            return (tokens[i], tokens[j]), (texts[i], texts[j])
    raise AssertionError("no two letters are two tokens in a row")


def _possible(
    bench: Bench, options: Mapping[str, Any], n_most: int, before: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], str, FinishReason]]:
    """Every answer of tokens with a bias: tokens, text, and how it ends; ``n_most`` tokens at most."""
    for token in options["logit_bias"]:
        tokens, text = (*before, token), bench.vocab.decode([*before, token])
        stops = [text.index(stop) for stop in options.get("stop", ()) if stop in text]
        words = options.get("force_words", ())
        if token in bench.vocab.eog_ids or stops:
            if len(before) >= options.get("min_tokens", 0):
                yield tokens, text[: min(stops, default=None)], FinishReason.STOP
        elif len(tokens) == n_most:
            if all(word in text for word in words):
                yield tokens, text, FinishReason.LENGTH if n_most == options["max_tokens"] else FinishReason.CONSTRAINT
        else:
            yield from _possible(bench, options, n_most, tokens)


def _check_scores(result: BeamAnswer, options: Mapping[str, Any], what: str) -> None:
    """Check scores: log probabilities plus biases, by length; a common prefix has the same log probabilities."""
    scores = [hypothesis.score for hypothesis in result.hypotheses]
    assert scores == sorted(scores, reverse=True), f"{what}: the scores {scores} are not in order"
    known: dict[tuple[int, ...], float] = {}
    for hypothesis in result.hypotheses:
        total = sum(hypothesis.logprobs) + sum(options["logit_bias"].get(token, 0.0) for token in hypothesis.tokens)
        expected = total / len(hypothesis.tokens) ** options.get("length_penalty", 1.0)
        assert math.isclose(hypothesis.score, expected, rel_tol=1e-6), f"{what}: {hypothesis!r}, expected {expected}"
        for n, logprob in enumerate(hypothesis.logprobs, 1):
            first = known.setdefault(hypothesis.tokens[:n], logprob)
            assert first == logprob <= 0, (
                f"{what}: token {n} of {hypothesis!r} has log probability {logprob} and {first}"
            )

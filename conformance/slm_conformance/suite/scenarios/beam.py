"""Beam search over the backend's forks: hypotheses, scores, and no trace in the session."""

from __future__ import annotations

import numpy as np

from slm_conformance.suite.bench import Bench, contents_of, log_softmax
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import next_row
from slm_core.chat import Session
from slm_core.errors import InvalidSequence
from slm_core.generation import Beams, FinishReason
from slm_core.types import Capability

N_PROMPT = 20
WIDTH = 4
N_TOKENS = 6


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
        before, holds = next_row(session), contents_of(session.context)
        session.beam_search(Beams(WIDTH - 1, max_tokens=N_TOKENS))
        assert contents_of(session.context) == holds, "a beam search left something in the context"
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


def _session(bench: Bench) -> Session:
    session = Session(bench.context(n_seq_max=WIDTH + 1), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session

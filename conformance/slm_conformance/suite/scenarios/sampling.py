"""Sampling from the backend's logits: probabilities, seeds, and saved random streams."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Session
from slm_core.sampling import SamplerChain, Sampling

PLAIN = Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, seed=17)
"""No truncation: every token may be sampled, with its probability."""

ORDER = ("logit_bias", "end_of_answer", "penalties", "top_k", "top_p", "min_p", "temperature")
"""The default order of the steps that ``SEVERAL`` uses, as in the docs."""

SEVERAL = Sampling(
    eog_bias=6.0,
    min_tokens=4,
    repeat_penalty=1.4,
    frequency_penalty=0.3,
    presence_penalty=0.5,
    penalty_window=7,
    top_k=60,
    top_p=0.9,
    min_p=0.02,
    temperature=1.6,
)

SHARE_ROUNDING = 1e-5
"""A chain may compute in float32; sums of some hundred probabilities are then off by about 1e-6."""

FREE: Mapping[str, object] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.2, "seed": 6}

LEARNING: tuple[Mapping[str, object], ...] = (
    {},
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.6},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.6},
    {"adaptive_entropy": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"repeat_penalty": 1.8, "frequency_penalty": 1.0, "penalty_window": 9},
    {"min_tokens": 20, "eog_bias": 6.0},
    {"no_repeat_ngram": 1, "top_k": 25},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_breakers": ()},
)
"""Options whose next draw depends on earlier tokens or draws."""

N_DRAWS = 2000
SIGMAS = 6


class TestSampling(Scenarios):
    """Sampling: draws follow from the row and the seed; copies and dumps keep the random stream."""

    above_contract = True

    def test_shares(self, bench: Bench) -> None:
        """Sampling: 2,000 draws follow softmax, by chi-square, at three temperatures."""
        row = self._row(bench)
        for temperature in (0.7, 1.0, 1.6):
            chain = SamplerChain(Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=temperature, seed=17))
            drawn = np.bincount([chain.sample(row) for _ in range(N_DRAWS)], minlength=len(row))
            self._check_shares(drawn, _softmax(row / temperature), f"at temperature {temperature}")

    @staticmethod
    def _check_shares(drawn: NDArray[np.intp], shares: NDArray[np.float64], what: str) -> None:
        """Chi-square test against the probabilities; cells with fewer than 10 expected draws are merged."""
        expected = shares * N_DRAWS
        rare = expected < 10
        counts = np.append(drawn[~rare], drawn[rare].sum())
        expected_counts = np.append(expected[~rare], expected[rare].sum())
        counts, expected_counts = counts[expected_counts > 0], expected_counts[expected_counts > 0]
        statistic, freedom = float(((counts - expected_counts) ** 2 / expected_counts).sum()), len(expected_counts) - 1
        # Chi-square with k degrees of freedom has mean k and variance 2k; a cell's 1/expected adds at most 1/10 each.
        limit = freedom + SIGMAS * float(np.sqrt(2 * freedom + freedom / 10)) + SIGMAS
        assert statistic < limit, (
            f"{what}, the chi-square of {N_DRAWS} draws against softmax is {statistic:.0f} with {freedom} degrees of"
            f" freedom (allowed: {limit:.0f})"
        )

    def test_truncation(self, bench: Bench) -> None:
        """Sampling: top_k, top_p and min_p keep the tokens of their definitions, and each of them is drawn."""
        row = self._row(bench)
        shares = np.sort(_softmax(row))[::-1]
        order = np.argsort(-row, kind="stable")
        n_nucleus = int(np.count_nonzero(np.cumsum(shares) - shares < 0.5))
        cases = {
            "top_k=5": (Sampling(top_k=5, top_p=1, min_p=0, temperature=2.0, seed=3), 5),
            "top_p=0.5": (Sampling(top_k=0, top_p=0.5, min_p=0, temperature=2.0, seed=3), n_nucleus),
            "min_p=0.3": (
                Sampling(top_k=0, top_p=1, min_p=0.3, temperature=2.0, seed=3),
                int(np.count_nonzero(shares >= 0.3 * shares[0])),
            ),
        }
        for what, (sampling, n) in cases.items():
            chain = SamplerChain(sampling)
            drawn = {chain.sample(row) for _ in range(N_DRAWS)}
            strangers = drawn - set(order[:n].tolist())
            assert not strangers, f"{what} keeps {n} tokens of this row, but token {min(strangers)} was drawn"
            missing = set(order[: min(n, 20)].tolist()) - drawn
            assert not missing, f"{what} keeps {n} tokens of this row, but {min(missing)} never came in {N_DRAWS} draws"

    def test_a_seed(self, bench: Bench) -> None:
        """Sampling: an answer is a function of its seed; two seeds give two answers."""
        first, repeated, other = (self._answer(bench, seed) for seed in (1, 1, 2))
        assert first == repeated, "two answers of the same seed differ"
        assert first != other, f"seeds 1 and 2 both gave {first}"

    def test_draws_differ(self, bench: Bench) -> None:
        """Sampling: the draws of a stream vary, and two streams of a seed have different draws."""
        row = self._row(bench)
        streams = [SamplerChain(PLAIN, stream=stream) for stream in (0, 1)]
        first, second = ([chain.sample(row) for _ in range(60)] for chain in streams)
        assert len(set(first)) > 1, f"60 draws of one stream were all token {first[0]}"
        assert first != second, "two streams of a seed give the same draws"

    def test_greedy(self, bench: Bench) -> None:
        """Sampling: temperature 0 gives the largest logit, whatever the seed."""
        row = self._row(bench)
        drawn = {SamplerChain(Sampling(temperature=0, seed=seed)).sample(row) for seed in range(5)}
        assert drawn == {int(row.argmax())}, f"greedy chose {drawn}, the largest logit is that of {int(row.argmax())}"

    def test_the_row_stays(self, bench: Bench) -> None:
        """Sampling: ``sample`` does not change the row of logits, with penalties, too."""
        row = self._row(bench)
        before = row.copy()
        chain = SamplerChain(Sampling(repeat_penalty=1.7, seed=1))
        for _ in range(5):
            chain.accept(chain.sample(row))
        assert np.array_equal(row, before), "sampling changed the row of logits"

    def test_penalty(self, bench: Bench) -> None:
        """Sampling: a repeat penalty divides positive and multiplies negative logits of earlier tokens, once each."""
        penalty, prompt = 3.0, bench.tokens(20)
        sampling = Sampling(temperature=0, repeat_penalty=penalty, max_tokens=20)
        tokens = _session(bench, sampling).generate().run().tokens

        def penalized(i: int, row: Rows) -> Rows:
            came = np.isin(np.arange(len(row)), [*prompt, *tokens[:i]])
            return np.where(came, np.where(row > 0, row / penalty, row * penalty), row)

        bench.chosen(prompt, tokens, f"a greedy answer with repeat_penalty={penalty}", penalized, factor=penalty)

    def test_the_steps_and_their_order(self, bench: Bench) -> None:
        """Sampling: bias, penalties, truncation and temperature equal their formulas, in two orders."""
        row = self._row(bench)
        likely = np.argsort(-row)[:40]  # penalties affect these
        history = [int(likely[token % 40]) for token in bench.tokens(90, seed=3)]
        for order in ((), ("temperature", "min_p", "top_p", "top_k", "penalties", "logit_bias", "end_of_answer")):
            for n_said in (3, 4):
                sampling = replace(SEVERAL, logit_bias={history[-1]: 2.0, 7: -1.5, 11: -math.inf}, order=order)
                chain = SamplerChain(sampling, eog_ids=bench.vocab.eog_ids)
                chain.set_history(history, n_said=n_said)
                ids, shares = chain.distribution(row.copy())
                expected = _by_formula(row, sampling, history, sorted(bench.vocab.eog_ids), n_said)
                probabilities = np.zeros(len(row))
                probabilities[ids] = shares
                worst = int(np.abs(probabilities - expected).argmax())
                assert abs(probabilities[worst] - expected[worst]) < SHARE_ROUNDING, (
                    f"after {n_said} tokens of an answer, with order={order or 'that of the docs'}, token {worst} has"
                    f" the share {probabilities[worst]:.6f}; by the formulas it is {expected[worst]:.6f}"
                )

    def test_the_state_of_each_step(self, bench: Bench) -> None:
        """Sampling: a clone and a restored state continue with the state of each step; ``reset`` forgets it."""
        rows = [np.asarray(row, np.float32) for row in bench.feed(bench.context(), bench.tokens(30))]
        for options in LEARNING:
            chain = SamplerChain(Sampling(**{**FREE, **options}), eog_ids=bench.vocab.eog_ids)  # type: ignore[arg-type]
            first_draws = [_drawn(chain, row) for row in rows[:15]]
            clone, other = chain.clone(), SamplerChain(chain.sampling, stream=3, eog_ids=bench.vocab.eog_ids)
            other.set_state(chain.state())
            goes_on = [_drawn(chain, row) for row in rows[15:]]
            for copied, name in ((clone, "a clone"), (other, "a chain given the state")):
                draws = [_drawn(copied, row) for row in rows[15:]]
                assert draws == goes_on, f"with {options}, {name} goes on with {draws}, not {goes_on}"
            chain.reset()
            assert [_drawn(chain, row) for row in rows[:15]] == first_draws, (
                f"with {options}, reset() does not begin anew"
            )

    def test_a_session_dump_goes_on(self, bench: Bench) -> None:
        """Sampling: a session that is dumped between two answers continues elsewhere with the same draws."""
        session = _session(bench, replace(UNIFORM, max_tokens=8))
        first = session.generate().run().tokens
        restored = Session.restore(bench.context(), bench.vocab, session.dump())
        original_tokens, restored_tokens = (either.generate().run().tokens for either in (session, restored))
        assert restored_tokens == original_tokens, "a session that was dumped goes on with other draws"
        assert original_tokens != first or len(original_tokens) < 2, (
            "the second answer of a session repeats the draws of the first"
        )

    @staticmethod
    def _row(bench: Bench) -> NDArray[np.float32]:
        return np.asarray(bench.feed(bench.context(), bench.tokens(20))[-1], np.float32)

    @staticmethod
    def _answer(bench: Bench, seed: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=16)
        return _session(bench, sampling).generate().run().tokens


def _drawn(chain: SamplerChain, row: NDArray[np.float32]) -> int:
    token = chain.sample(row.copy())
    chain.accept(token)
    return token


def _by_formula(
    row: NDArray[np.float32], sampling: Sampling, history: Sequence[int], ends: Sequence[int], n_said: int
) -> NDArray[np.float64]:
    """The probabilities of all tokens [V], by docs/sampling.md."""
    logits = row.astype(np.float64)
    for step in sampling.order or ORDER:
        present = np.isfinite(logits)
        shares = np.where(present, _softmax(np.where(present, logits, -1e30)), 0.0)
        if step == "logit_bias":
            for token, bias in sampling.logit_bias.items():
                logits[token] += bias
        elif step == "end_of_answer":
            logits[ends] = -np.inf if n_said < sampling.min_tokens else logits[ends] + sampling.eog_bias
        elif step == "penalties":
            window = Counter(history[-(sampling.penalty_window or len(history)) :])
            for token, n in window.items():
                penalty = sampling.repeat_penalty
                logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
                logits[token] -= n * sampling.frequency_penalty + sampling.presence_penalty
        elif step == "top_k":
            logits[np.argsort(-logits, kind="stable")[sampling.top_k :]] = -np.inf
        elif step == "top_p":
            ranked = np.argsort(-logits, kind="stable")
            logits[ranked[np.cumsum(shares[ranked]) - shares[ranked] >= sampling.top_p]] = -np.inf
        elif step == "min_p":
            logits[shares < sampling.min_p * shares.max()] = -np.inf
        else:
            logits /= sampling.temperature
    return np.where(np.isfinite(logits), _softmax(np.where(np.isfinite(logits), logits, -1e30)), 0.0)


def _session(bench: Bench, sampling: Sampling) -> Session:
    session = Session(bench.context(), bench.vocab, sampling=sampling)
    session.append_tokens(bench.tokens(20))
    return session


def _softmax(row: NDArray[np.floating]) -> NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares

"""Draws from the backend's logits: the right shares, the same for a seed, and a stream that goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slm_conformance.bench import Bench, Rows
from slm_conformance.scenarios.base import Scenarios
from slm_conformance.scenarios.sessions import UNIFORM
from slm_core.chat import Session
from slm_core.sampling import SamplerChain, Sampling

PLAIN = Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, seed=17)
"""Every token may come, as often as its probability says."""

N_DRAWS = 2000
SIGMAS = 6


class TestSampling(Scenarios):
    """Sampling: the draws are what the row says and a function of the seed; their stream survives copies and dumps."""

    def test_shares(self, bench: Bench) -> None:
        """Sampling: over 2,000 draws tokens come as often as softmax says, by chi-square, at three temperatures."""
        row = self._row(bench)
        for temperature in (0.7, 1.0, 1.6):
            chain = SamplerChain(Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=temperature, seed=17))
            drawn = np.bincount([chain.sample(row) for _ in range(N_DRAWS)], minlength=len(row))
            self._check_shares(drawn, _softmax(row / temperature), f"at temperature {temperature}")

    @staticmethod
    def _check_shares(drawn: NDArray[np.intp], shares: NDArray[np.float64], what: str) -> None:
        """Chi-square against the shares; a cell of fewer than 10 expected draws joins the others of its kind."""
        expected = shares * N_DRAWS
        rare = expected < 10
        found = np.append(drawn[~rare], drawn[rare].sum())
        wanted = np.append(expected[~rare], expected[rare].sum())
        found, wanted = found[wanted > 0], wanted[wanted > 0]
        statistic, freedom = float(((found - wanted) ** 2 / wanted).sum()), len(wanted) - 1
        # Chi-square of k degrees of freedom has mean k and variance 2k; a cell's 1/expected adds at most 1/10 each.
        limit = freedom + SIGMAS * float(np.sqrt(2 * freedom + freedom / 10)) + SIGMAS
        assert statistic < limit, (
            f"{what}, the chi-square of {N_DRAWS} draws against softmax is {statistic:.0f} with {freedom} degrees of"
            f" freedom (allowed: {limit:.0f})"
        )

    def test_cuts(self, bench: Bench) -> None:
        """Sampling: top_k, top_p and min_p keep the tokens that their definitions keep, and all of them come."""
        row = self._row(bench)
        shares = np.sort(_softmax(row))[::-1]
        order = np.argsort(-row, kind="stable")
        n_nucleus = int(np.count_nonzero(np.cumsum(shares) - shares < 0.5))
        kept = {
            "top_k=5": (Sampling(top_k=5, top_p=1, min_p=0, temperature=2.0, seed=3), 5),
            "top_p=0.5": (Sampling(top_k=0, top_p=0.5, min_p=0, temperature=2.0, seed=3), n_nucleus),
            "min_p=0.3": (
                Sampling(top_k=0, top_p=1, min_p=0.3, temperature=2.0, seed=3),
                int(np.count_nonzero(shares >= 0.3 * shares[0])),
            ),
        }
        for what, (sampling, n) in kept.items():
            chain = SamplerChain(sampling)
            drawn = {chain.sample(row) for _ in range(N_DRAWS)}
            strangers = drawn - set(order[:n].tolist())
            assert not strangers, f"{what} keeps {n} tokens of this row, but token {min(strangers)} was drawn"
            missing = set(order[: min(n, 20)].tolist()) - drawn
            assert not missing, f"{what} keeps {n} tokens of this row, but {min(missing)} never came in {N_DRAWS} draws"

    def test_a_seed(self, bench: Bench) -> None:
        """Sampling: an answer is a function of its seed; two seeds give two answers."""
        first, again, other = (self._answer(bench, seed) for seed in (1, 1, 2))
        assert first == again, "two answers of the same seed differ"
        assert first != other, f"seeds 1 and 2 both gave {first}"

    def test_draws_differ(self, bench: Bench) -> None:
        """Sampling: the draws of one stream are not all the same, and no two streams of a seed are."""
        row = self._row(bench)
        streams = [SamplerChain(PLAIN, stream=stream) for stream in (0, 1)]
        first, second = ([chain.sample(row) for _ in range(60)] for chain in streams)
        assert len(set(first)) > 1, f"60 draws of one stream were all token {first[0]}"
        assert first != second, "two streams of a seed give the same draws"

    def test_greedy(self, bench: Bench) -> None:
        """Sampling: at temperature 0 the largest logit comes, whatever the seed."""
        row = self._row(bench)
        drawn = {SamplerChain(Sampling(temperature=0, seed=seed)).sample(row) for seed in range(5)}
        assert drawn == {int(row.argmax())}, f"greedy chose {drawn}, the largest logit is that of {int(row.argmax())}"

    def test_the_row_stays(self, bench: Bench) -> None:
        """Sampling: ``sample`` leaves the row as it was, penalties included."""
        row = self._row(bench)
        before = row.copy()
        chain = SamplerChain(Sampling(repeat_penalty=1.7, seed=1))
        for _ in range(5):
            chain.accept(chain.sample(row))
        assert np.array_equal(row, before), "sampling changed the row of logits"

    def test_state_and_clone(self, bench: Bench) -> None:
        """Sampling: a clone, and a chain given the state, go on with the same draws; ``reset`` begins anew."""
        row, chain = self._row(bench), SamplerChain(PLAIN)
        begun = [chain.sample(row) for _ in range(25)]
        twin, other = chain.clone(), SamplerChain(Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, seed=99))
        other.set_state(chain.state())
        goes_on = [chain.sample(row) for _ in range(25)]
        assert [twin.sample(row) for _ in range(25)] == goes_on, "a clone goes on with other draws"
        assert [other.sample(row) for _ in range(25)] == goes_on, "a chain given the state goes on with other draws"
        chain.reset()
        assert [chain.sample(row) for _ in range(25)] == begun, "after reset() the draws are not the first ones"

    def test_penalty(self, bench: Bench) -> None:
        """Sampling: a repeat penalty divides positive and multiplies negative logits of what came before, once each."""
        penalty, prompt = 3.0, bench.tokens(20)
        sampling = Sampling(temperature=0, repeat_penalty=penalty, max_tokens=20)
        tokens = _session(bench, sampling).generate().run().tokens

        def penalized(i: int, row: Rows) -> Rows:
            came = np.isin(np.arange(len(row)), [*prompt, *tokens[:i]])
            return np.where(came, np.where(row > 0, row / penalty, row * penalty), row)

        bench.chosen(prompt, tokens, f"a greedy answer with repeat_penalty={penalty}", penalized, factor=penalty)

    def test_a_session_dump_goes_on(self, bench: Bench) -> None:
        """Sampling: a session that is dumped between two answers goes on, in another context, with the same draws."""
        session = _session(bench, replace(UNIFORM, max_tokens=8))
        first = session.generate().run().tokens
        twin = Session.restore(bench.context(), bench.vocab, session.dump())
        here, there = (which.generate().run().tokens for which in (session, twin))
        assert there == here, "a session that was dumped goes on with other draws"
        assert here != first or len(here) < 2, "the second answer of a session repeats the draws of the first"

    @staticmethod
    def _row(bench: Bench) -> NDArray[np.float32]:
        return np.asarray(bench.feed(bench.context(), bench.tokens(20))[-1], np.float32)

    @staticmethod
    def _answer(bench: Bench, seed: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=16)
        return _session(bench, sampling).generate().run().tokens


def _session(bench: Bench, sampling: Sampling) -> Session:
    session = Session(bench.context(), bench.vocab, sampling=sampling)
    session.append_tokens(bench.tokens(20))
    return session


def _softmax(row: NDArray[np.floating]) -> NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares

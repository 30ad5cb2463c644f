"""Sampled drafts: the tokens have the distribution of plain sampling, by chi-square tests on a Markov chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from scripted import ByteVocab
from slm_core.errors import InvalidToken
from slm_core.generation import Generation
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    PromptLookup,
    Proposal,
    Speculation,
    SpeculativeSource,
    SuffixIndex,
    accept_or_draw,
)
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Advance, Constraint, Forward
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

N = 8
N_DRAWS = 15_000
"""Of the mistakes in ``accept_or_draw``, to redraw from p changes the distribution least. If half of the tokens come
from it, each token adds 0.009 or more to the expected chi-square: 9,000 tokens exceed the bound of ``check`` twice."""
TABLE = (
    np.random.default_rng(3).standard_normal((N, N)).astype(np.float32)
)  # logits of the next token, by the last token
OTHER = np.random.default_rng(4).standard_normal((N, N))


class TableHistory:
    """A history whose next logits are a row of ``TABLE``; logits after right expected tokens are known in advance."""

    edit_level = EditLevel.TRUNCATE

    def __init__(self) -> None:
        self.history: list[int] = [0]
        self.n_ahead = 0
        self.known = False

    @property
    def n_tokens(self) -> int:
        return len(self.history)

    @property
    def n_pending(self) -> int:
        return 1

    @property
    def knows_next(self) -> bool:
        return self.known

    def next_logits(
        self, cancelled: Callable[[], bool], *, expected: Sequence[int] = (), progress: object = None
    ) -> NDArray[np.float32]:
        if not self.known:
            self.n_ahead, self.known, self.ahead = len(expected), True, list(expected)
        return TABLE[self.history[-1]]

    def take(self, token: int) -> None:
        hit = bool(self.ahead) and self.ahead[0] == token
        self.ahead = self.ahead[1:] if hit else []
        self.known = hit
        self.history.append(token)

    def settle(self) -> None:
        self.known = False


class SampledDrafter:
    """A drafter that samples from the softmax of the row of ``OTHER`` for the last token."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = lambda: False) -> Proposal:
        drafted, draft_probabilities, last = [], [], tokens[-1]
        for _ in range(n):
            q = np.exp(OTHER[last])
            q /= q.sum()
            last = int(self.random.choice(N, p=q))
            drafted.append(last)
            draft_probabilities.append((np.arange(N)[::-1], q[::-1]))
        return Proposal(drafted, draft_probabilities)

    def settings(self) -> None:
        return


class HalfOfTokens:
    """A constraint that allows half of the tokens."""

    is_complete = False
    allowed = (0, 3, 4, 6)

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        row = np.full_like(logits, -np.inf)
        row[list(self.allowed)] = logits[list(self.allowed)]
        return row

    def advance(self, token: int) -> Advance:
        if token not in self.allowed:
            raise InvalidToken(f"{token}")
        return Forward()

    def clone(self) -> HalfOfTokens:
        return self

    def state(self) -> bytes:
        return b""


def generated(
    drafter: Drafter, sampling: Sampling, n: int = N_DRAWS, constraint: Constraint | None = None
) -> tuple[list[int], Generation]:
    source, progress = TableHistory(), Progress(1, 0, n, ())
    drafts = SpeculativeSource(source, Speculation(drafter, n_max=3, adaptive=False), progress, constraint=constraint)
    generation = Generation(
        drafts, ByteVocab(), SamplerChain(sampling), progress, constraint=constraint, speculation=drafts
    )
    generation.run()
    return source.history, generation


def check(history: Sequence[int], probabilities: NDArray[np.float64]) -> None:
    """Chi-square test of all transitions against the table of their probabilities."""
    counts = np.zeros((N, N))
    np.add.at(counts, (np.array(history[:-1]), np.array(history[1:])), 1)
    expected = counts.sum(axis=1, keepdims=True) * probabilities
    assert not counts[probabilities == 0].any(), "a token of probability 0 was generated"
    expected = expected[probabilities > 0]
    assert expected.min() > 3, "too few draws for a chi-square"
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    freedom = int((probabilities > 0).sum()) - int((probabilities > 0).any(axis=1).sum())
    # Pearson's statistic of counts with the expectations E has mean k and a variance of at most 2k + sum(1 / E). The
    # seeds are fixed; of other seeds, about one in 100,000 would exceed six standard deviations.
    bound = 6 * np.sqrt(2 * freedom + (1 / expected).sum())
    assert abs(statistic - freedom) < bound, f"chi-square {statistic:.0f} of {freedom} degrees"


PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)
CUT = Sampling(temperature=0.7, top_k=4, top_p=1.0, min_p=0.0, seed=11)


def table_of(sampling: Sampling) -> NDArray[np.float64]:
    logits = TABLE.astype(np.float64)
    if sampling.top_k:
        logits = np.where(logits >= np.sort(logits)[:, -sampling.top_k][:, None], logits, -np.inf)
    weights = np.exp(logits / sampling.temperature)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
def test_sampled_drafts_keep_the_distribution(sampling: Sampling) -> None:
    history, generation = generated(SampledDrafter(5), sampling)
    check(history, table_of(sampling))
    q = np.exp(OTHER) / np.exp(OTHER).sum(axis=1, keepdims=True)
    overlap = np.minimum(q, table_of(sampling)).sum(axis=1)
    stats = generation.answer.speculation
    assert overlap.min() * 0.5 < stats.acceptance < overlap.max(), (
        "the acceptance is within the overlap of the distributions"
    )
    assert stats.rounds > 1000


def test_sampled_drafts_keep_the_distribution_under_a_constraint() -> None:
    history, generation = generated(SampledDrafter(5), PLAIN, constraint=HalfOfTokens())
    weights = np.where(np.isin(np.arange(N), HalfOfTokens.allowed), np.exp(TABLE.astype(np.float64)), 0)[
        list(HalfOfTokens.allowed)
    ]
    probabilities = np.zeros((N, N))
    probabilities[list(HalfOfTokens.allowed)] = weights / weights.sum(axis=1, keepdims=True)
    check(history, probabilities)
    assert generation.answer.speculation.accepted > 1000


@pytest.mark.parametrize("drafter", [PromptLookup(3, 1), SuffixIndex(1), DraftFunction(lambda tokens, n: [2] * n)])
def test_looked_up_drafts_keep_the_exact_tokens(drafter: Drafter) -> None:
    history, generation = generated(drafter, PLAIN, 3000)
    chain, plain = SamplerChain(PLAIN), [0]
    while len(plain) < len(history):
        plain.append(chain.sample(TABLE[plain[-1]]))
    assert history == plain
    assert generation.answer.speculation.accepted > 300


def test_a_draft_from_an_equal_distribution_is_always_accepted() -> None:
    chain = SamplerChain(PLAIN)
    for row in TABLE:
        ids, p = chain.distribution(row)
        for token in range(N):
            assert accept_or_draw(chain, row, token, (ids, p)) == token


def test_a_token_excluded_by_the_chain_is_never_generated() -> None:
    chain = SamplerChain(Sampling(temperature=0))
    for row in TABLE:
        for token in range(N):
            draft_probabilities = (np.array([token]), np.ones(1))
            assert accept_or_draw(chain, row, token, draft_probabilities) == row.argmax()


def test_a_seed_gives_the_same_tokens_again() -> None:
    assert generated(SampledDrafter(5), PLAIN, 1000)[0] == generated(SampledDrafter(5), PLAIN, 1000)[0]

"""The sampler chain compared with plain formulas, and its draws with their distribution."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slm_core.errors import InvalidSnapshot, SamplingError
from slm_core.sampling import SamplerChain, Sampling
from slm_core.sampling.chain import _place
from slm_core.sampling.stream import UniformStream

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def logits(n: int = 40, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def expected(
    row: np.ndarray, *, top_k: int = 0, top_p: float = 1, min_p: float = 0, temperature: float = 1.0
) -> np.ndarray:
    """Probabilities [V] from the definitions, token by token."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if top_k:
        order = order[:top_k]
    p = {i: np.exp(float(row[i])) for i in order}
    total, reached, remaining = sum(p.values()), 0.0, []
    for i in order:
        if reached < top_p * total or not remaining:
            remaining.append(i)
        reached += p[i]
    remaining = [i for i in remaining if p[i] >= min_p * p[order[0]]]
    out = np.zeros(len(row))
    out[remaining] = np.exp((row[remaining].astype(float) - row.max()) / temperature)
    return out / out.sum()


@pytest.mark.parametrize("n", [3, 9000])
def test_the_largest_random_number_chooses_a_token(n: int) -> None:
    for seed in range(64):
        rng = np.random.default_rng(seed)
        probs = rng.random(n) * 2.0 ** rng.integers(-60, 3, n)
        assert 0 <= _place(probs, 1 - 2.0**-53) < n
        assert _place(np.append(probs, 2.0**10), 1 - 2.0**-53) == n


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 2.5},
        {"temperature": 0.4},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    ],
    ids=str,
)
def test_draws_follow_the_defined_distribution(options: dict[str, float]) -> None:
    row = logits()
    chain = SamplerChain(Sampling(**{**OFF, **options, "seed": 11}))
    n = 20_000
    check_shares([chain.sample(row) for _ in range(n)], expected(row, **options))


def test_draws_with_xtc_follow_the_mixture_of_both_distributions() -> None:
    row, probability = logits(), 0.35
    whole = expected(row)
    likely = np.flatnonzero(whole >= 0.05)
    assert len(likely) > 2
    cut = np.where(np.isin(np.arange(len(row)), likely) & (whole > whole[likely].min()), 0, whole)
    chain = SamplerChain(Sampling(**OFF, seed=2, xtc_probability=probability, xtc_threshold=0.05))
    check_shares([chain.sample(row) for _ in range(20_000)], probability * cut / cut.sum() + (1 - probability) * whole)


def check_shares(drawn: list[int], p: np.ndarray) -> None:
    """Chi-square test of draws against probabilities [V]."""
    n, counts = len(drawn), np.bincount(drawn, minlength=len(p))
    assert not counts[p == 0].any(), "an excluded token was sampled"
    # Pearson's statistic has mean k and variance 2k for k degrees of freedom: chance exceeds 6 sigma once in 10^8 runs.
    pooled = p * n >= 5
    observed = np.append(counts[pooled], counts[~pooled].sum())
    expected_counts = np.append(p[pooled], p[~pooled].sum()) * n
    observed, expected_counts = observed[expected_counts > 0], expected_counts[expected_counts > 0]
    freedom = len(expected_counts) - 1
    statistic = ((observed - expected_counts) ** 2 / expected_counts).sum()
    assert statistic < freedom + 6 * np.sqrt(2 * max(freedom, 1)), f"chi-square {statistic:.1f} at {freedom} degrees"


def test_temperature_zero_chooses_the_likeliest() -> None:
    row = logits()
    assert SamplerChain(Sampling(temperature=0)).sample(row) == row.argmax()


def test_repeat_penalty_changes_the_choice_by_its_formula() -> None:
    row = np.array([2.0, 1.5, -1.0], np.float32)
    chain = SamplerChain(Sampling(temperature=0, repeat_penalty=2.0))
    chain.accept(0)
    assert chain.sample(row) == 1, "2.0 / 2 is below 1.5"
    negative = np.array([-1.0, -1.5], np.float32)
    assert chain.sample(negative) == 1, "-1.0 * 2 is below -1.5"
    assert row.tolist() == [2.0, 1.5, -1.0], "the row is not changed"


def test_penalties_see_the_last_64_tokens() -> None:
    row = np.zeros(100, np.float32)
    row[7], row[8] = 2.0, 1.5
    chain = SamplerChain(Sampling(temperature=0, repeat_penalty=2.0))
    chain.set_history([7, *range(20, 83)])
    assert chain.sample(row) == 8
    chain.accept(50)
    assert chain.sample(row) == 7, "token 7 has left the window"


def test_a_seed_gives_one_stream_of_different_draws() -> None:
    row = np.zeros(1000, np.float32)

    def draws(seed: int = 1, stream: int = 0) -> list[int]:
        chain = SamplerChain(Sampling(**OFF, seed=seed), stream=stream)
        return [chain.sample(row) for _ in range(20)]

    first = draws()
    assert first == draws()
    assert len(set(first)) > 15, f"20 draws from 1000 equal tokens gave {sorted(set(first))}"
    assert first != draws(seed=2)
    assert first != draws(stream=1)


def test_without_a_seed_two_chains_differ() -> None:
    row = np.zeros(1000, np.float32)
    a, b = SamplerChain(Sampling(**OFF)), SamplerChain(Sampling(**OFF))
    assert [a.sample(row) for _ in range(8)] != [b.sample(row) for _ in range(8)]


@given(st.lists(st.integers(0, 39), max_size=80), st.integers(0, 5))
def test_state_and_clone_continue_the_same_stream(history: list[int], n_before: int) -> None:
    row = logits()
    chain = SamplerChain(Sampling(**{**OFF, "repeat_penalty": 1.3, "seed": 5}))
    chain.set_history(history)
    for _ in range(n_before):
        chain.accept(chain.sample(row))
    twin, restored = chain.clone(), SamplerChain(chain.sampling)
    restored.set_state(chain.state())
    runs = []
    for each in (chain, twin, restored):
        run = []
        for _ in range(10):
            run.append(each.sample(row))
            each.accept(run[-1])
        runs.append(run)
    assert runs[0] == runs[1] == runs[2]


def test_a_chain_keeps_no_array_of_the_size_of_the_vocabulary() -> None:
    """At 150,000 tokens one byte a token would be 150 kB for each request of an engine."""
    row = logits(150_000)
    chains = [SamplerChain(Sampling(seed=i, logit_bias={7: -1.0})) for i in range(20)]
    chains[0].sample(row)
    tracemalloc.start()
    try:
        for chain in chains[1:]:
            chain.accept(chain.sample(row))
        assert tracemalloc.get_traced_memory()[0] < 150_000
    finally:
        tracemalloc.stop()


def test_reset_restarts_the_stream() -> None:
    row = logits()
    chain = SamplerChain(Sampling(**OFF, repeat_penalty=1.5, seed=3))
    first = [chain.sample(row)]
    for _ in range(5):
        chain.accept(first[-1])
        first.append(chain.sample(row))
    chain.reset()
    assert chain.sample(row) == first[0]


FOREIGN = [
    *(b"", b"{}", b"[1,2]", b"[1,2,[-1]]", b'[1,"2",[]]', b"[" * 5000, b"\xff"),
    *(b"[1,2,3,[]]\n", b'[1,2,3,{"a":NaN}]\n', b'[1,2,3,{"a":1%s}]\n' % (b"0" * 400), b'[1,2,3,{"a":"b"}]\n'),
    *(b"[1,2,3,{}]\nabc", b"[1,2,3,{}]\n\xff\xff\xff\xff", b"[1,2,-3,{}]\n", b"[1,%d,3,{}]\n" % 2**64),
]


@pytest.mark.parametrize("state", FOREIGN, ids=lambda state: repr(state[:30]))
def test_a_foreign_state_is_refused_and_changes_nothing(state: bytes) -> None:
    chain = SamplerChain(Sampling(**OFF, seed=3))
    before = chain.state()
    with pytest.raises(InvalidSnapshot):
        chain.set_state(state)
    assert chain.state() == before


def test_logits_without_a_finite_value_raise() -> None:
    for bad in (np.full(3, -np.inf, np.float32), np.array([0, np.nan], np.float32)):
        with pytest.raises(SamplingError):
            SamplerChain(Sampling()).sample(bad)


def test_numbers_of_steps_are_a_stream_of_their_own() -> None:
    def split_mix(n: int) -> int:
        """Output n of SplitMix64 with seed 0 (Steele, Lea, Flood 2014)."""
        z = n * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    stream = UniformStream(seed=7, stream=3)
    start = split_mix(split_mix(7) ^ 3)
    for n_draws in range(3):
        numbers, offset = stream.aside(), split_mix(start + n_draws)
        expected = [(split_mix(offset + i) >> 11) / 2**53 for i in (1, 2, 3)]
        assert [numbers() for _ in expected] == expected, "the numbers changed: dumped answers continue with others"
        stream.take()


def test_the_largest_counts_of_a_state_are_restored() -> None:
    chain = SamplerChain(Sampling(seed=1))
    for counts in ([2**64 - 1, 2, 3], [1, 2**64 - 1, 3], [1, 2, 2**64 - 1]):
        chain.set_state(json.dumps([*counts, {}]).encode() + b"\n")
        assert json.loads(chain.state().partition(b"\n")[0])[:3] == counts


@pytest.mark.parametrize("extreme", [{"mirostat_tau": 1e30}, {"mirostat_eta": 1e30}], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_a_state_with_the_largest_numbers_of_mirostat_is_restored(version: int, extreme: dict[str, float]) -> None:
    sampling = Sampling.preset("neutral", mirostat=version, seed=1, **extreme)
    chain, restored = SamplerChain(sampling), SamplerChain(sampling)
    logits = np.arange(5, dtype=np.float32)
    for _ in range(3):
        chain.accept(chain.sample(logits))
    restored.set_state(chain.state())
    assert restored.state() == chain.state()
    assert restored.sample(logits) == chain.sample(logits)


def test_the_first_token_may_be_in_a_restored_history() -> None:
    chain, restored = (SamplerChain(Sampling(seed=1, repeat_penalty=1.5)) for _ in range(2))
    chain.set_history([0, 3, 0])
    restored.set_state(chain.state())
    assert restored.state() == chain.state()

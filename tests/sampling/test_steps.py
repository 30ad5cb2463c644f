"""Sampling steps compared with formulas, token by token, and properties of all steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import ByteVocab
from slm_core.errors import InvalidOption, SamplingError
from slm_core.sampling import SamplerChain, Sampling, StepState, truncation
from slm_core.sampling.candidates import fewest, largest, remove, shortlist
from slm_core.sampling.steps import Known, build_steps

TOLERANCE = 1e-5
"""Rows are float32: one ulp of a logit up to 20 is 2e-6."""


def row(n: int = 60, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def neutral(**options: object) -> SamplerChain:
    return SamplerChain(Sampling.preset("neutral", **{"seed": 1, **options}))


# Formulas without a reference implementation in a library.


@pytest.mark.parametrize("a", [0.05, 0.3, 1.0])
def test_top_a_keeps_tokens_above_a_share_of_the_squared_maximum(a: float) -> None:
    for seed in range(10):
        logits = row(seed=seed)
        p = softmax(logits)
        assert neutral(top_a=a).distribution(logits)[0].tolist() == np.flatnonzero(p >= a * p.max() ** 2).tolist()


def test_adaptive_temperature_follows_the_running_mean_entropy() -> None:
    target, decay, temperature = 3.6, 0.6, 1.3
    chain = neutral(adaptive_entropy=target, adaptive_decay=decay, temperature=temperature)
    mean, factors = None, []
    for step in range(20):
        logits = row(seed=step, scale=0.2 + 0.3 * (step % 7))
        here = entropy(softmax(logits / temperature))
        mean = here if mean is None else decay * mean + (1 - decay) * here
        factors.append(min(1.0, target / mean))
        ids, probs = chain.distribution(logits)
        np.testing.assert_allclose(probs, softmax(logits / (temperature * factors[-1]))[ids], rtol=1e-4)
        assert np.array_equal(chain.distribution(logits)[1], probs), "a second call does not change the state"
        chain.accept(chain.sample(logits))
    assert min(factors) < 1 == max(factors), "the temperature is lowered in some steps and not in others"


def test_min_keep_of_xtc_and_its_random_numbers() -> None:
    """XTC's random numbers depend on earlier draws, but are independent of the numbers of the draws."""
    logits, n = np.array([2.0, 1.9, 1.8, 1.0], np.float32), 4000
    chain = neutral(xtc_probability=0.5)
    counts = np.zeros((2, 2))
    for _ in range(n):
        cut = len(chain.distribution(logits)[0]) < len(logits)
        counts[int(cut), int(chain.uniform() < 0.5)] += 1
    # Four cells of n/4: chi-square with three degrees of freedom; six sigma.
    statistic = float(((counts - n / 4) ** 2 / (n / 4)).sum())
    assert statistic < 3 + 6 * math.sqrt(6), f"chi-square {statistic:.1f}: {counts.tolist()}"


@pytest.mark.parametrize(("number", "n_left"), [(0.49, 1), (0.5, 2)])
def test_xtc_acts_below_its_probability_not_at_it(number: float, n_left: int) -> None:
    state = StepState(np.zeros(0, np.int32), 0, 2, {}, lambda: number)
    ids, _ = truncation.xtc(np.arange(2), np.zeros(2, np.float32), state, probability=0.5, threshold=0.1, min_keep=1)
    assert len(ids) == n_left


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": 0.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1}, ["temperature"]),
        ({"temperature": 0.0, "top_k": 40, "typical_p": 0.9}, ["top_k", "typical_p", "temperature"]),
        ({"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7}, ["top_k", "temperature"]),
        ({"top_k": 40, "min_p": 0.1, "temperature": 0.7}, ["top_k", "temperature"]),
        ({"top_p": 0.9, "min_p": 0.1, "temperature": 0.7}, ["top_p", "min_p", "temperature"]),
    ],
)
def test_steps_that_cost_time_and_change_nothing_are_left_out(options: dict[str, float], names: list[str]) -> None:
    steps = build_steps(Sampling.preset("neutral", **options), Known())
    assert [name for name, _ in steps] == names


def test_eog_bias_and_bans_if_only_eog_is_allowed() -> None:
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    only_end = np.array([-np.inf, 2.0, -np.inf], np.float32)
    for options in ({"min_tokens": 4}, {"eog_bias": -math.inf}):
        chain = SamplerChain(Sampling.preset("neutral", **options), eog_ids=[1])
        assert chain.distribution(logits)[0].tolist() == [0, 2]
        assert chain.distribution(only_end)[0].tolist() == [1], "a complete constraint allows only EOG"
    biased = SamplerChain(Sampling.preset("neutral", eog_bias=1.5), eog_ids=[1]).distribution(logits)[1]
    np.testing.assert_allclose(biased, softmax(np.array([1.0, 3.5, 3.0])))


def test_banning_every_token_names_the_step() -> None:
    with pytest.raises(SamplingError, match="'logit_bias' left none"):
        neutral(banned_tokens=[0, 1, 2]).sample(row(3))
    chain = neutral(no_repeat_ngram=1)
    chain.set_history([0, 1, 2])
    with pytest.raises(SamplingError, match="'no_repeat_ngram' left none"):
        chain.sample(row(3))


def test_a_refused_row_changes_nothing() -> None:
    chain = neutral(mirostat=2)
    chain.accept(chain.sample(row()))
    before = chain.state()
    for bad in (np.full(60, -np.inf, np.float32), np.full(60, np.nan, np.float32), np.full(60, np.inf, np.float32)):
        with pytest.raises(SamplingError):
            chain.sample(bad)
    assert chain.state() == before


def test_logits_that_overflow_are_refused_in_one_line() -> None:
    with pytest.raises(SamplingError, match="largest logit"):
        neutral(temperature=1e-4).sample(np.array([3e38, 1.0], np.float32))


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"adaptive_entropy": 1.0}, {"logprobs": 1}], ids=str)
def test_a_forced_token_does_not_change_the_state_of_steps(options: dict[str, object]) -> None:
    chain = neutral(**options)
    chain.accept(chain.sample(row()))
    learned = chain.state().split(b"{")[1]
    assert chain.drawn_from is None
    chain.accept(3)  # accepted without a draw
    assert chain.state().split(b"{")[1] == learned
    chain.sample(row())
    chain.set_history([])
    chain.accept(3)
    assert chain.state().split(b"{")[1] == learned, "the row belongs to an old history"


def test_a_clone_and_a_state_contain_the_length_of_the_answer() -> None:
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    chain = SamplerChain(Sampling.preset("neutral", min_tokens=3), eog_ids=[1])
    for _ in range(2):
        chain.accept(0)
    restored = SamplerChain(chain.sampling, eog_ids=[1])
    restored.set_state(chain.state())
    for each in (chain, chain.clone(), restored):
        assert 1 not in each.distribution(logits)[0]
        each.accept(0)
        assert 1 in each.distribution(logits)[0]


def test_each_step_has_its_own_window() -> None:
    chain = neutral(temperature=0, presence_penalty=5.0, penalty_window=3, dry_multiplier=9.0, dry_breakers=())
    chain.set_history([4, 0, 1, 2, 3, 0, 1])
    logits = np.array([9.0, 8.0, 7.0, 6.5, 6.0], np.float32)
    # 0, 1 and 3 are among the last three tokens: minus 5. 2 followed 0, 1 before: minus 9. 4 is outside the window.
    assert chain.sample(logits) == 4


def test_the_state_is_as_long_as_the_widest_window() -> None:
    chain = neutral(repeat_penalty=1.1, penalty_window=50)
    for i in range(5000):
        chain.accept(i % 7)
    assert len(chain.state()) < 50 * 4 + 100
    assert len(SamplerChain(Sampling()).state()) < 100


# Requirements of steps on a vocabulary.


def test_breakers_are_the_tokens_that_contain_their_text() -> None:
    class Vocab(ByteVocab):
        size = 6

        def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
            return (b"a", b"b\n", b"cc", b"\nd", b"e*f", b"g")[id]

    options = {"dry_multiplier": 1.0, "dry_allowed_length": 1, "temperature": 0}
    history = [0, 1, 5, 0, 1]

    def best(breakers: tuple[str | int, ...]) -> int:
        chain = SamplerChain.for_vocab(Sampling.preset("neutral", dry_breakers=breakers, **options), Vocab())
        chain.set_history(history)
        return chain.sample(np.array([0, 0, 0, 0, 0.5, 1.0], np.float32))

    assert best(()) == 4, "token 5 followed 0, 1 before"
    assert best(("\n",)) == 5, "token 1 contains a line break, which ends a repetition"
    assert best((1,)) == 5
    assert best(("*", 2, "z")) == 4, "a breaker that no token contains has no effect"
    with pytest.raises(InvalidOption, match=r"'xyz', which no token .* holds"):
        best(("xyz",))


def test_a_chain_reports_what_it_needs_from_the_vocabulary() -> None:
    with pytest.raises(InvalidOption, match="for_vocab"):
        SamplerChain(Sampling(min_tokens=3))
    with pytest.raises(InvalidOption, match="for_vocab"):
        SamplerChain(Sampling(dry_multiplier=1.0))
    with pytest.raises(InvalidOption, match=r"token 260 \(accepted: 0 to 259\)"):
        SamplerChain.for_vocab(Sampling(banned_tokens=[260]), ByteVocab())


# Properties of all steps.

FLOATS = st.floats(-30, 30, width=32)
SHARES = st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(st.integers(0, 20), FLOATS, max_size=3),
        "banned_tokens": st.lists(st.integers(0, 2), max_size=1),
        "repeat_penalty": st.floats(0.5, 2),
        "frequency_penalty": st.floats(-1, 1),
        "presence_penalty": st.floats(-1, 1),
        "dry_multiplier": st.floats(0.1, 2),
        "no_repeat_ngram": st.integers(2, 4),
        "top_n_sigma": st.floats(0.01, 3),
        "top_k": st.integers(0, 9),
        "typical_p": SHARES,
        "top_p": SHARES,
        "min_p": SHARES,
        "top_a": SHARES,
        "epsilon_cutoff": SHARES,
        "eta_cutoff": SHARES,
        "xtc_probability": SHARES,
        "temperature": st.sampled_from([0.05, 0.5, 1.0, 3.0]),
        "dynatemp_range": st.floats(0, 2),
        "adaptive_entropy": st.floats(0.1, 2),
    },
)
ROWS = st.lists(FLOATS, min_size=4, max_size=40).map(lambda values: np.array(values, np.float32))
HISTORIES = st.lists(st.integers(0, 4), max_size=30)


@settings(deadline=None, max_examples=200)
@given(OPTIONS, ROWS, HISTORIES)
def test_a_distribution_sums_to_one_and_changes_nothing(
    options: dict[str, object], logits: np.ndarray, history: list[int]
) -> None:
    chain = neutral(**options, **({"dry_breakers": ()} if options.get("dry_multiplier") else {}))
    chain.set_history(history)
    before, state = logits.copy(), chain.state()
    try:
        ids, probs = chain.distribution(logits)
    except SamplingError as error:
        assert "left none" in str(error)
        assert options.get("no_repeat_ngram") or options.get("banned_tokens")
        return
    assert (ids.dtype, probs.dtype, len(ids)) == (np.int64, np.float64, len(probs))
    assert len(ids) > 0
    assert (np.diff(ids) > 0).all()
    assert 0 <= ids[0] <= ids[-1] < len(logits)
    assert probs.sum() == pytest.approx(1, abs=1e-6)
    assert (probs >= 0).all()
    assert np.array_equal(logits, before)
    assert chain.state() == state
    assert chain.sample(logits) in ids


@settings(deadline=None, max_examples=150)
@given(OPTIONS, st.integers(0, 2**20), HISTORIES)
def test_greedy_chooses_the_likeliest_of_the_remaining_tokens(
    options: dict[str, object], seed: int, history: list[int]
) -> None:
    """Greedy sampling skips steps that cannot change its choice; the choice must be the same as with them."""
    others = {name: value for name, value in options.items() if name not in ("dynatemp_range", "adaptive_entropy")}
    others |= {"dry_breakers": ()} if others.get("dry_multiplier") else {}
    logits = row(30, seed=seed)
    greedy, drawing = neutral(**{**others, "temperature": 0}), neutral(**{**others, "temperature": 1.0})
    for chain in (greedy, drawing):
        chain.set_history(history)
    try:
        ids, probs = drawing.distribution(logits)
    except SamplingError:
        return
    assert greedy.sample(logits) == ids[probs.argmax()]


@settings(deadline=None, max_examples=100)
@given(OPTIONS, st.randoms(use_true_random=False))
def test_distributions_do_not_depend_on_token_ids(options: dict[str, object], random: object) -> None:
    """A permutation of the tokens of a row permutes its distribution."""
    logits = row(30, seed=random.randrange(2**30))  # type: ignore[attr-defined]
    places = list(range(30))
    random.shuffle(places)  # type: ignore[attr-defined]
    history = [random.randrange(6) for _ in range(20)]  # type: ignore[attr-defined]
    renamed = dict(options)
    if "logit_bias" in options:
        renamed["logit_bias"] = {places[token]: bias for token, bias in options["logit_bias"].items()}
    if "banned_tokens" in options:
        renamed["banned_tokens"] = [places[token] for token in options["banned_tokens"]]
    whole = np.zeros((2, 30))
    for probabilities, chosen, names, permuted in (
        (whole[0], options, range(30), logits),
        (whole[1], renamed, places, None),
    ):
        chain = neutral(**chosen, **({"dry_breakers": ()} if chosen.get("dry_multiplier") else {}))
        chain.set_history([names[token] for token in history])
        if permuted is None:
            permuted = np.empty_like(logits)
            permuted[places] = logits
        try:
            ids, probs = chain.distribution(permuted)
        except SamplingError:
            continue
        probabilities[ids] = probs
    np.testing.assert_allclose(whole[1][places], whole[0], rtol=1e-4, atol=1e-7)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["top_n_sigma", "typical_p", "top_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff"]),
    SHARES.filter(lambda share: share < 1),
    st.integers(1, 9),
    ROWS,
)
def test_truncation_keeps_at_least_min_keep(step: str, value: float, min_keep: int, logits: np.ndarray) -> None:
    ids, probs = neutral(**{step: value}, min_keep=min_keep).distribution(logits)
    assert len(ids) >= min(min_keep, len(logits))
    if step != "typical_p":
        least, others = logits[ids].min(), np.delete(logits, ids)
        assert not len(others) or others.max() <= least, "a removed token is not likelier than the kept tokens"
        assert probs[logits[ids].argmax()] == probs.max()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=300), st.integers(1, 320))
def test_largest_equals_a_truncated_stable_sort(values: list[int], k: int) -> None:
    array = np.repeat(np.array(values, np.float32), 5)
    expected = np.sort(np.argsort(-array, kind="stable")[:k])
    assert largest(array, k).tolist() == expected.tolist()


@pytest.mark.parametrize("n_values", [5, 1000, 10**9])
def test_largest_of_a_whole_vocabulary(n_values: int) -> None:
    """Above a few thousand values, a bound is computed first."""
    array = np.random.default_rng(1).integers(0, n_values, 50_021).astype(np.float32)
    for k in (1, 40, 700, 20_000):
        assert largest(array, k).tolist() == np.sort(np.argsort(-array, kind="stable")[:k]).tolist()


@pytest.mark.parametrize("shift", [-2048.0, 2048.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"top_n_sigma": 1.0},
        {"typical_p": 0.6},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_a": 0.3},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.03},
        {"dynatemp_range": 0.5},
        {"adaptive_entropy": 2.0},
        {"mirostat": 1, "mirostat_tau": 3.0},
        {"mirostat": 2, "mirostat_tau": 3.0},
    ],
    ids=str,
)
def test_a_constant_added_to_all_logits_changes_nothing(options: dict[str, object], shift: float) -> None:
    high = row(60) + np.float32(shift)  # exponentials of these logits overflow, or vanish
    ids, probs = neutral(**options).distribution(high)
    expected_ids, expected = neutral(**options).distribution(high - np.float32(shift))
    assert ids.tolist() == expected_ids.tolist()
    # One ulp of a float32 logit of 2048 is 2.4e-4; a step that divides logits rounds to it.
    np.testing.assert_allclose(probs, expected, rtol=1e-3)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=300),
    st.integers(1, 299),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_fused_truncation_equals_the_three_steps(
    values: list[int], k: int, p: float, minimum: float, min_keep: int
) -> None:
    """Bit for bit, with ties: the same seed gives the same tokens."""
    k = min(k, len(values) - 1)
    state = StepState(np.zeros(0, np.int32), 0, len(values), {}, float)
    expected = np.arange(len(values)), np.repeat(np.float32(0.7), len(values)) * np.array(values, np.float32)
    fused = truncation.top_k_top_p_min_p(*expected, state, k=k, p=p, min_p=minimum, min_keep=min_keep)
    expected = truncation.top_k(*expected, state, k=k)
    expected = truncation.top_p(*expected, state, p=p, min_keep=min_keep) if p < 1 else expected
    expected = truncation.min_p(*expected, state, p=minimum, min_keep=min_keep) if minimum else expected
    np.testing.assert_array_equal(fused[0], expected[0])
    np.testing.assert_array_equal(fused[1], expected[1], strict=True)


@pytest.mark.parametrize("n_vocab", [20_000, 32_003])
@pytest.mark.parametrize("n_allowed", [1, 30, 41, 5000])
def test_a_large_row_that_excludes_tokens(n_vocab: int, n_allowed: int) -> None:
    """A constraint sets forbidden tokens to -inf, which may be nearly all tokens."""
    rng = np.random.default_rng(n_allowed)
    logits = np.full(n_vocab, -np.inf, np.float32)
    allowed = np.sort(rng.choice(n_vocab, n_allowed, replace=False))
    allowed[-1] = n_vocab - 1
    logits[allowed] = 0.1 * rng.standard_normal(n_allowed)
    ids, probs = neutral(top_k=40).distribution(logits)
    expected = np.sort(np.argsort(-logits, kind="stable")[: min(40, n_allowed)])
    assert ids.tolist() == expected.tolist()
    np.testing.assert_allclose(probs, softmax(logits[expected]), rtol=TOLERANCE)


@pytest.mark.parametrize("place", [0, 17_000, 32_002])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_large_row_with_an_invalid_logit_is_refused(value: float, place: int) -> None:
    logits = row(32_003)
    logits[place] = value
    with pytest.raises(SamplingError, match=f"the largest logit is {value}"):
        SamplerChain(Sampling(seed=1)).sample(logits)


@pytest.mark.parametrize("n_places", [0, 1, 2, 64, 65, 299, 300])
def test_exactly_the_removed_positions_are_gone(n_places: int) -> None:
    rng = np.random.default_rng(n_places)
    ids, logits = np.sort(rng.choice(10_000, 300, replace=False)), rng.standard_normal(300).astype(np.float32)
    for fixed in ([], [0], [299], [0, 299]):
        others = [place for place in rng.permutation(300).tolist() if place not in fixed]
        places = np.array(sorted([*fixed, *others][:n_places]), np.intp)
        stays = [place for place in range(300) if place not in places.tolist()]
        remaining = remove(ids, logits, places)
        np.testing.assert_array_equal(remaining[0], ids[stays])
        np.testing.assert_array_equal(remaining[1], logits[stays])
        assert remaining[1].dtype == np.float32


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.97, 1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_fewest_of_a_whole_vocabulary(mass: float, scale: float) -> None:
    keys = row(30_011, seed=3, scale=scale)
    weights = softmax(keys)
    order = np.argsort(-keys, kind="stable")
    n = max(2, int(np.count_nonzero(np.cumsum(weights[order]) - weights[order] < mass * (1 - 1e-9))))
    assert fewest(keys, weights, mass * (1 - 1e-9), 2).tolist() == np.sort(order[:n]).tolist()


@pytest.mark.parametrize("n_vocab", [300, 8192, 20_003])
def test_a_draw_is_the_token_at_the_random_number(n_vocab: int) -> None:
    """Large vocabularies are summed in blocks: the token is the same as with one cumulative sum."""
    logits = row(n_vocab, seed=5, scale=1.0)
    chain, numbers = neutral(), neutral()
    edges = np.cumsum(softmax(logits))
    for _ in range(300):
        number = numbers.uniform()
        token = chain.sample(logits)
        # Weights are float32: the error of an edge is at most one ulp of 1, 1.2e-7.
        assert (edges[token - 1] if token else 0) - 2e-7 <= number <= edges[token] + 2e-7


def test_the_last_tokens_of_a_large_vocabulary_can_be_drawn() -> None:
    logits = np.full(20_003, -50, np.float32)
    logits[[19_990, 20_002]] = 1.0
    chain = neutral()
    assert {chain.sample(logits) for _ in range(60)} == {19_990, 20_002}


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([3, 40, 5000, 50_021]),
    st.sampled_from([2, 30, 10**6]),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.sampled_from([1, 7, 64, 500]),
    st.integers(0, 2**20),
)
def test_a_shortlist_contains_the_largest_values(
    n_vocab: int, n_values: int, share_banned: float, k: int, seed: int
) -> None:
    """With ties, and with so few finite values that the bound of groups of groups is -inf."""
    random = np.random.default_rng(seed)
    values = random.integers(0, n_values, n_vocab).astype(np.float32)
    values[random.random(n_vocab) < share_banned] = -np.inf
    few = shortlist(values, k)
    if few is None:
        return
    places, kept_values = few
    assert np.array_equal(values[places], kept_values)
    expected = np.argsort(-values, kind="stable")[:k]
    assert np.isin(expected, places).all()
    assert len(set(places.tolist())) == len(places)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 2**20), st.booleans())
def test_a_greedy_chain_agrees_with_its_distribution(
    n_vocab: int, n_values: int, seed: int, with_logprobs: bool
) -> None:
    """Ties go to the lowest id, with and without ``logprobs``, and both cases use one random number."""
    values = np.random.default_rng(seed).integers(0, n_values, n_vocab).astype(np.float32)
    chain, other = (
        SamplerChain(Sampling(temperature=0, seed=1, logprobs=2 if with_logprobs else None)) for _ in range(2)
    )
    ids, probs = other.distribution(values)
    assert (chain.sample(values), probs.tolist()) == (ids[0], [1.0])
    other.uniform()
    assert chain.state() == other.state()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_greedy_chain_refuses_an_invalid_logit(value: float) -> None:
    chain = SamplerChain(Sampling(temperature=0, seed=1))
    before = chain.state()
    for row in (np.array([1, value, 2], np.float32), np.full(3, -np.inf, np.float32)):
        with pytest.raises(SamplingError, match="no token can be chosen: the largest logit is"):
            chain.sample(row)
    assert chain.state() == before

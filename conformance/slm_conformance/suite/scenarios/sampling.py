"""Sampling from the backend's logits: probabilities, seeds, options, and saved random streams."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.sampling import DocumentedChain, uniform_numbers
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Session
from slm_core.errors import InvalidOption, SamplingError, UnknownOption
from slm_core.sampling import ORDER, SamplerChain, Sampling

Options = Mapping[str, Any]

NEUTRAL: Options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 17}
"""Every step is off: each token may be drawn, with its probability."""

SEVERAL: Options = {
    "eog_bias": 6.0,
    "min_tokens": 4,
    "repeat_penalty": 1.4,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.5,
    "penalty_window": 7,
    "top_k": 60,
    "top_p": 0.9,
    "min_p": 0.02,
    "temperature": 1.6,
}
TRUNCATED: Options = {"typical_p": 0.8, "top_n_sigma": 2.5, "top_a": 0.5, "epsilon_cutoff": 1e-3, "eta_cutoff": 2e-3}
DRY: Options = {"dry_multiplier": 0.8}

SHARE_ROUNDING = 1e-5
"""A chain may compute in float32; sums of some hundred probabilities are then off by about 1e-6."""

DECIDED = 1e-4
"""If a step decides by a smaller distance, float32 and float64 may decide differently."""

LEARNING: tuple[Options, ...] = (
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

MIROSTAT: Options = {**NEUTRAL, "mirostat": 2}
SHARES = ("typical_p", "top_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff", "xtc_probability")
LARGEST = 1e30
INF, NAN = math.inf, math.nan

LIMITS: Mapping[str, tuple[Options, Sequence[object], Sequence[object]]] = {
    "logit_bias": (
        {},
        ({}, {3: -INF, "4": 2}, {2**31 - 1: -LARGEST}),
        ([1, 2], {"x": 1.0}, {"0" * 12: 1.0}, {-1: 1.0}, {2**31: 1.0}, {True: 1.0}, {1: INF}, {1: NAN}, {1: None}),
    ),
    "banned_tokens": ({}, ((), [5, 4, 5], {7}, (0, 2**31 - 1)), ("ab", b"ab", 5, {1: 2}, [True], [-1], [2**31], [1.5])),
    "eog_bias": ({}, (-INF, "-inf", LARGEST, -LARGEST), (INF, NAN, "1", True, 1.1 * LARGEST)),
    "min_tokens": ({}, (0, 2**63 - 1), (-1, 1.0, True, 2**63, None)),
    "repeat_penalty": ({}, (1e-9, 1, LARGEST), (0, -1, INF, "1", True)),
    "frequency_penalty": ({}, (-LARGEST, 0, LARGEST), (INF, -1.1 * LARGEST, "1", False)),
    "presence_penalty": ({}, (-LARGEST, 0, LARGEST), (INF, -1.1 * LARGEST, "1", False)),
    "penalty_window": ({"repeat_penalty": 1.1}, (1, None), (0, True, 1.5)),
    "dry_multiplier": ({}, (0, 2.5), (-0.1, INF)),
    "dry_base": (DRY, (1,), (0.999,)),
    "dry_allowed_length": (DRY, (1,), (0, None)),
    "dry_window": (DRY, (1, None), (0,)),
    "dry_breakers": (DRY, ("ab", ("ab", 3), []), (("",), (True,), (2**31,), (1.5,), 3)),
    "no_repeat_ngram": ({}, (0, 3), (-1, 1.5)),
    "top_n_sigma": ({}, (0, LARGEST), (-0.1,)),
    "top_k": ({}, (0, 1, 2**63 - 1), (-1, True, 2.0, 2**63)),
    **dict.fromkeys(SHARES, ({}, (0, 1, 0.5), (-1e-9, 1.000001, NAN))),
    "xtc_threshold": ({"xtc_probability": 0.5}, (1e-9, 0.5), (0, 0.51)),
    "temperature": ({}, (0, 1e-4, LARGEST), (-1e-9, 9e-5, NAN, INF, 10**400)),
    "dynatemp_range": ({}, (0, 2), (-0.1,)),
    "dynatemp_exponent": ({"dynatemp_range": 0.3}, (1e-9, 2), (0,)),
    "adaptive_entropy": ({}, (0, 5), (-0.1,)),
    "adaptive_decay": ({"adaptive_entropy": 1.0}, (0, 0.999), (-0.1, 0.9991)),
    "mirostat": (NEUTRAL, (0, 1, 2), (-1, 3, 1.0)),
    "mirostat_tau": (MIROSTAT, (1e-9,), (0,)),
    "mirostat_eta": (MIROSTAT, (1e-9,), (0,)),
    "min_keep": ({}, (1, 40), (0, 41)),
    "order": ({}, ((), ORDER, list(ORDER[::-1])), ("top_k", (1,), (*ORDER, "top_k"), ORDER[:-3], {})),
    "custom": ({}, ({},), ({"x": 1}, {"top_k": {}}, [1], {"x": {"y": NAN}})),
    "logprobs": ({}, (None, 0, 1000), (-1, 1001, True)),
    "seed": ({}, (None, 0, 2**63 - 1), (-1, 2**63)),
    "max_tokens": ({}, (None, 0, 2**63 - 1), (-1, 1.0)),
    "stop": ({}, ("x", ["x", "yz"], ()), (("",), 3, [1], b"x")),
}
"""For each option: other options that it needs, values that are accepted, and values that are refused."""

WITHOUT_EFFECT: tuple[Options, ...] = (
    {"penalty_window": 9},
    {"dry_base": 1.3},
    {"dry_allowed_length": 5},
    {"dry_window": 30},
    {"dry_breakers": ("o",)},
    {"xtc_threshold": 0.02},
    {"dynatemp_exponent": 2.0},
    {"adaptive_decay": 0.2},
    {"mirostat_tau": 2.0},
    {"mirostat_eta": 0.7},
    {**NEUTRAL, "min_keep": 2},
    {**MIROSTAT, "temperature": 0},
    {"temperature": 0, "dynatemp_range": 0.3},
    {"temperature": 0, "adaptive_entropy": 1.0},
    {"mirostat": 1},
    {"min_tokens": 9, "max_tokens": 8},
    {"order": ("top_k", "temperature")},
)
"""Options that contradict each other, or cannot act."""

WITH_EFFECT: tuple[Options, ...] = (
    {"min_tokens": 8, "max_tokens": 8},
    {**NEUTRAL, "min_keep": 2, "xtc_probability": 0.5},
    {**NEUTRAL, "min_keep": 2, "top_p": 0.5},
    {"top_k": 3, "min_keep": 3},
    {"temperature": 0, "dynatemp_range": 0.0},
)
"""Options that resemble ``WITHOUT_EFFECT``, and act."""

SPELLED: tuple[tuple[Options, Options], ...] = (
    ({"temp": 0.5, "max_new_tokens": 9}, {"temperature": 0.5, "max_tokens": 9}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": True, "top_k": -1}, {"top_k": 0}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"max_tokens": 4, "n_predict": 4}, {"max_tokens": 4}),
)
"""Options in other spellings, and the same options in the spelling of this library."""

N_TOP: tuple[tuple[Options, int | None], ...] = (
    ({"temperature": 0}, 1),
    ({"top_k": 1}, 1),
    ({"top_k": 1024, "top_p": 0.5}, 1024),
    ({"top_k": 1025}, None),
    ({}, None),
    ({"top_k": 12, "repeat_penalty": 1.5}, None),
)
"""Options, and the number of largest logits that a chain needs; None for all."""

CONTRADICTIONS: tuple[Options, ...] = (
    {"max_tokens": 4, "n_predict": 5},
    {"do_sample": True, "temperature": 0},
    {"logprobs": False, "top_logprobs": 3},
)


class TestSampling(Scenarios):
    """Sampling: draws follow from the row and the seed; copies and dumps keep the random stream."""

    above_contract = True

    def test_the_steps_and_their_order(self, bench: Bench) -> None:
        """Sampling: each step, and steps in two orders, equal their formulas; the seed's numbers choose the tokens."""
        rows = [np.asarray(row, np.float32) for row in bench.feed(bench.context(), bench.tokens(5, seed=3))]
        likely = np.argsort(-rows[0], kind="stable").tolist()
        a, b, c, d = likely[:4]
        long_history = [*likely[:9] * 3, *likely[10:30], *likely[:4]]
        of_three = [likely[token % 3] for token in bench.tokens(30, seed=9)]
        short_histories: list[list[int]] = [
            [],
            [a],
            [a, a],
            [a, b, a],
            [a, b, a, b],
            [c, a, b, c, a, b],
            [d, a, d, a, b, d, a],
            [b] * 60,
            of_three,
        ]
        for number, options in enumerate(_each_step(likely)):
            reads_history = any(option.startswith(("dry", "no_repeat")) for option in options)
            for history, n_rows in ((long_history, 5), *((each, 1) for each in short_histories if reads_history)):
                sampling = Sampling(**{**NEUTRAL, **options})
                chain = SamplerChain.for_vocab(sampling, bench.vocab, stream=number)
                chain.set_history(history, n_said=2)
                documented = DocumentedChain(sampling, bench.vocab, list(history), n_said=2)
                what = f"with {dict(options)} after {history}"
                _check_draws(chain, documented, rows[:n_rows], uniform_numbers(17, stream=number), what)

    def test_equal_logits(self, bench: Bench) -> None:
        """Sampling: of equal logits, the lower ids stay; a token exactly at the bound of a step stays."""
        letters = bench.vocab.encode("abcd", add_special=False, parse_special=False)[-4:]
        row = np.full(bench.vocab.size, -np.inf, np.float32)
        row[letters] = 0.0
        cases: tuple[tuple[Options, int], ...] = (
            ({}, 4),
            ({"top_k": 3}, 3),
            ({"top_k": 3, "top_p": 0.99, "min_p": 1.0}, 3),
            ({"top_p": 0.5}, 2),
            ({"top_p": 0.51, "min_keep": 2}, 3),
            ({"typical_p": 0.26}, 2),
            ({"min_p": 1.0}, 4),
            ({"epsilon_cutoff": 0.25}, 4),
            ({"epsilon_cutoff": 0.26, "min_keep": 2}, 2),
            ({"eta_cutoff": 1.0}, 4),
            ({"top_n_sigma": 1e-6}, 4),
            ({"top_a": 1.0}, 4),
            ({"mirostat": 2, "mirostat_tau": 1.0}, 4),
            ({"xtc_probability": 1.0, "xtc_threshold": 0.25}, 1),
            ({"temperature": 0.0}, 1),
        )
        for (options, n), more in itertools.product(cases, (0, 1000)):  # exp(1000) overflows float64
            ids, shares = SamplerChain(Sampling(**{**NEUTRAL, **options})).distribution(row + np.float32(more))
            assert (ids.tolist(), shares.tolist()) == (sorted(letters)[:n], [1 / n] * n), (
                f"of four tokens with the logit {more}, {dict(options)} keeps {ids.tolist()} with shares"
                f" {shares.tolist()}; expected the first {n} of {sorted(letters)}"
            )

        a, b, c, d = letters
        row[[c, d]] = -np.inf
        chain = SamplerChain(Sampling(**NEUTRAL, min_tokens=1), eog_ids=(b, c, d))
        assert chain.distribution(row)[0].tolist() == [a], "an EOG token may be drawn before min_tokens"
        row[a] = -np.inf
        assert chain.distribution(row)[0].tolist() == [b], "an EOG token that is the only candidate cannot be drawn"

    def test_options(self, bench: Bench) -> None:
        """Sampling: values within their limits survive JSON; other values, names and combinations are refused."""
        for option, (others, accepted, refused) in LIMITS.items():
            for value in accepted:
                self._check_survives_json({**others, option: value})
            for value in refused:
                with bench.refused(f"{option}={value!r}", InvalidOption, UnknownOption):
                    Sampling(**{**others, option: value})
        for options in WITHOUT_EFFECT:
            with bench.refused(f"options that cannot act, {options}", InvalidOption):
                Sampling(**options)
        for options in WITH_EFFECT:
            self._check_survives_json(options)
        for theirs, ours in SPELLED:
            read = Sampling.create(**theirs)
            assert read == Sampling(**ours), f"{theirs} is read as {read!r}"
        for options in CONTRADICTIONS:
            with bench.refused(f"two spellings that disagree, {options}", InvalidOption):
                Sampling.create(**options)
        with bench.refused("an option that does not exist", UnknownOption):
            Sampling.create(top_q=1)
        for options, n_top in N_TOP:
            needed = SamplerChain(Sampling(**{**NEUTRAL, **options})).n_top
            assert needed == n_top, f"a chain with {options} needs {needed} of the largest logits, not {n_top}"
        for options in ({"banned_tokens": [0, bench.vocab.size]}, {**DRY, "dry_breakers": "\x00\x01\x02"}):
            with bench.refused(f"{options}, which the vocabulary lacks", InvalidOption):
                SamplerChain.for_vocab(Sampling(**options), bench.vocab)

    @staticmethod
    def _check_survives_json(options: Options) -> None:
        sampling = Sampling(**options)
        restored = Sampling.from_dict(json.loads(json.dumps(sampling.to_dict())))
        assert restored == sampling, f"{options} came out of JSON as {restored!r}, not {sampling!r}"

    def test_a_seed(self, bench: Bench) -> None:
        """Sampling: an answer is a function of its seed; two seeds give two answers."""
        first, repeated, other = (self._answer(bench, seed) for seed in (1, 1, 2))
        assert first == repeated, "two answers of the same seed differ"
        assert first != other, f"seeds 1 and 2 both gave {first}"

    def test_the_row_stays(self, bench: Bench) -> None:
        """Sampling: ``sample`` does not change the row of logits, whatever the steps."""
        row = self._row(bench)
        before, likely = row.copy(), np.argsort(-row).tolist()
        for options in _each_step(likely):
            chain = SamplerChain.for_vocab(Sampling(**{**NEUTRAL, **options}), bench.vocab)
            chain.set_history(likely[:9] * 3)
            chain.sample(row)
            assert np.array_equal(row, before), f"sampling with {dict(options)} changed the row of logits"

    def test_a_row_without_a_choice(self, bench: Bench) -> None:
        """Sampling: a row with NaN or infinity, or without a finite logit, raises ``SamplingError``; draws continue."""
        row = self._row(bench)
        bad = [row.copy() for _ in range(3)]
        bad[0][5], bad[1][5], bad[2][:] = NAN, INF, -INF
        for options in ({"temperature": 0}, {"top_k": 5}, {}, {"top_p": 0.5, "top_k": 0}):
            sampling = Sampling(**options, seed=3)
            chain, other = (SamplerChain.for_vocab(sampling, bench.vocab) for _ in range(2))
            for wrong, what in zip(bad, ("a NaN", "an infinite logit", "no finite logit"), strict=True):
                with bench.refused(f"a row with {what}, and {options}", SamplingError):
                    chain.sample(wrong)
            tokens = [[one.sample(row) for _ in range(5)] for one in (chain, other)]
            assert tokens[0] == tokens[1], f"with {options}, rows that were refused took draws"

    def test_penalty(self, bench: Bench) -> None:
        """Sampling: a repeat penalty divides positive and multiplies negative logits of earlier tokens, once each."""
        penalty, prompt = 3.0, bench.tokens(20)
        sampling = Sampling(temperature=0, repeat_penalty=penalty, max_tokens=20)
        tokens = _session(bench, sampling).generate().run().tokens

        def penalized(i: int, row: Rows) -> Rows:
            appeared = np.isin(np.arange(len(row)), [*prompt, *tokens[:i]])
            return np.where(appeared, np.where(row > 0, row / penalty, row * penalty), row)

        bench.chosen(prompt, tokens, f"a greedy answer with repeat_penalty={penalty}", penalized, factor=penalty)

    def test_the_state_of_each_step(self, bench: Bench) -> None:
        """Sampling: a clone and a restored state continue with the state of each step; ``reset`` forgets it."""
        rows = [np.asarray(row, np.float32) for row in bench.feed(bench.context(), bench.tokens(30))]
        base_options = {**NEUTRAL, "temperature": 1.2, "seed": 6}
        for options in LEARNING:
            chain = SamplerChain(Sampling(**{**base_options, **options}), eog_ids=bench.vocab.eog_ids)
            first_draws = [_drawn(chain, row) for row in rows[:15]]
            clone, other = chain.clone(), SamplerChain(chain.sampling, stream=3, eog_ids=bench.vocab.eog_ids)
            other.set_state(chain.state())
            later_draws = [_drawn(chain, row) for row in rows[15:]]
            for copied, name in ((clone, "a clone"), (other, "a chain given the state")):
                draws = [_drawn(copied, row) for row in rows[15:]]
                assert draws == later_draws, f"with {options}, {name} continues with {draws}, not {later_draws}"
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
        assert restored_tokens == original_tokens, "a session that was dumped continues with other draws"
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


def _each_step(likely: Sequence[int]) -> Iterator[Options]:
    """Options that turn on each step, alone and together; ``likely`` are the tokens by falling logits."""
    several = {**SEVERAL, "logit_bias": {likely[3]: 2.0, likely[1]: -1.5, likely[0]: -INF}}
    yield from ({}, {"temperature": 0}, {"temperature": 0.7}, several)
    yield {**several, "order": ("temperature", "min_p", "top_p", "top_k", "penalties", "logit_bias", "end_of_answer")}
    apart = ("top_k", "temperature", "top_p", "min_p")
    yield {"top_k": 20, "temperature": 2.0, "top_p": 0.7, "min_p": 0.2, "order": apart}
    yield from ({"banned_tokens": likely[:3]}, {"eog_bias": -INF}, {"eog_bias": 3.0}, {"min_tokens": 4})
    yield from ({"repeat_penalty": 0.7, "penalty_window": None}, {"frequency_penalty": 0.4}, {"presence_penalty": -0.4})
    yield from ({**DRY, "dry_breakers": ()}, {**DRY, "dry_breakers": (likely[2], "e"), "dry_allowed_length": 1})
    yield from ({**DRY, "dry_breakers": (min(likely[:4]),), "dry_base": base} for base in (1, 1.05))
    yield {**DRY, "dry_base": 1.3, "dry_allowed_length": 4, "dry_window": 12, "dry_breakers": ()}
    yield from ({"no_repeat_ngram": n} for n in (1, 2, 3))
    yield from ({"top_k": 1}, {"top_k": 12}, {"top_k": 10**6}, {"top_p": 0.6}, {"min_p": 0.3})
    yield from ({name: 0.94} for name in ("top_p", "typical_p"))  # 82 of 305 tokens stay: a short list is too short
    yield from ({name: value} for name, value in TRUNCATED.items())
    yield from ({name: value, "min_keep": 40} for name, value in {**TRUNCATED, "top_p": 0.1, "min_p": 0.9}.items())
    yield from ({"top_k": 12, "top_p": 0.7}, {"top_k": 12, "min_p": 0.4}, {"top_k": 12, "top_p": 0.3, "min_keep": 9})
    yield from ({"top_k": 12, "top_p": 0.9, "min_p": 0.8, "min_keep": 5}, {"top_k": 12, "min_p": 0.9, "min_keep": 5})
    yield from ({"xtc_probability": 1.0, "xtc_threshold": 0.004, "min_keep": n} for n in (1, 280))
    yield from ({"temperature": 0.3, "dynatemp_range": 0.5}, {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0})
    yield from ({"adaptive_entropy": 3.0}, {"adaptive_entropy": 3.0, "adaptive_decay": 0.2}, {"adaptive_entropy": 99})
    yield from ({"mirostat": n, "mirostat_tau": tau, "mirostat_eta": 0.6} for n in (1, 2) for tau in (2.0, 3.0))
    yield {"mirostat": 1, "mirostat_tau": 0.01}
    yield {**TRUNCATED, "temperature": 0.9, "xtc_probability": 1.0, "logprobs": 2}
    yield {"temperature": 0, "typical_p": 0.5, "top_p": 0.9}


def _check_draws(
    chain: SamplerChain,
    documented: DocumentedChain,
    rows: Sequence[NDArray[np.float32]],
    numbers: Iterator[float],
    what: str,
) -> None:
    """Draw and accept a token of each row; compare probabilities with the formulas, and tokens with the numbers."""
    for i, row in enumerate(rows):
        ids, shares = chain.distribution(row.copy())
        expected = documented.distribution(row)
        if documented.margin < DECIDED:
            return  # rounding decides what is kept, and later steps depend on it
        probabilities = np.zeros(len(row))
        probabilities[ids] = shares
        worst = int(np.abs(probabilities - expected).argmax())
        assert abs(probabilities[worst] - expected[worst]) < SHARE_ROUNDING, (
            f"{what}, token {worst} has the share {probabilities[worst]:.6f} of row {i}; by the formulas it is"
            f" {expected[worst]:.6f}"
        )
        from_top = _drawn_from_top(chain, row)
        token, number = chain.sample(row.copy()), next(numbers)
        upper = float(np.cumsum(expected)[token])
        assert upper - expected[token] - SHARE_ROUNDING <= number <= upper + SHARE_ROUNDING, (
            f"{what}, the random number {number:.6f} chose token {token} of row {i}, which is at {upper:.6f}"
        )
        assert from_top in (None, token), (
            f"{what}, the largest logits of row {i} give {from_top}, the row gives {token}"
        )
        chain.accept(token)
        documented.accept(token)


def _drawn_from_top(chain: SamplerChain, row: NDArray[np.float32]) -> int | None:
    """The token that a copy of the chain draws from the largest logits alone; None if it needs all of them."""
    if chain.n_top is None:
        return None
    top = np.argsort(-row, kind="stable")[: chain.n_top]
    return chain.clone().sample_top(top.astype(np.int32), row[top], len(row))


def _drawn(chain: SamplerChain, row: NDArray[np.float32]) -> int:
    token = chain.sample(row.copy())
    chain.accept(token)
    return token


def _session(bench: Bench, sampling: Sampling) -> Session:
    session = Session(bench.context(), bench.vocab, sampling=sampling)
    session.append_tokens(bench.tokens(20))
    return session

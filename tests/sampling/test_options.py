"""The sampling options: each does what docs/sampling.md says or raises, under each of its names."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import END, ByteVocab, Script, ScriptedContext
from slm_conformance.oracle.sampling import DocumentedChain, drawn, likeliest, softmax, uniform_numbers
from slm_conformance.suite.scenarios.sampling import LIMITS
from slm_core.chat import Session
from slm_core.errors import InvalidOption, OptionError, UnknownOption
from slm_core.generation import FinishReason
from slm_core.sampling import ORDER, SamplerChain, Sampling
from slm_core.sampling.aliases import SPELLINGS

TOLERANCE = 1e-5
"""Rows are float32: one ulp of a logit up to 20 is 2e-6."""

DocumentedLogprobs: TypeAlias = tuple[list[tuple[int, float]], list[tuple[int, float]], float] | None
"""Log probabilities of the model's top tokens, of the top tokens after the chain, and of the chosen token."""

Behaviour: TypeAlias = Callable[..., object]
"""Returns the effect of options, after an assertion that the effect is as documented."""


def checked_distributions(**options: object) -> np.ndarray:
    """Twelve distributions [12, V] along a history with repeated n-grams; they and the draws are as documented."""
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, **options})
    chain, rng, distributions = SamplerChain.for_vocab(sampling, ByteVocab()), np.random.default_rng(4), []
    history = list(b"once: upon a time, once: upon a time, once: up" * 3)
    chain.set_history(history)
    documented, numbers = DocumentedChain(sampling, ByteVocab(), history), uniform_numbers(5, stream=0)
    for _ in range(12):
        row = (2 * rng.standard_normal(260)).astype(np.float32)
        ids, probs = chain.distribution(row)
        distribution = np.zeros(260)
        distribution[ids] = probs
        np.testing.assert_allclose(distribution, documented.distribution(row), rtol=TOLERANCE, atol=1e-12)
        token = chain.sample(row)
        assert token == drawn(documented.probs, next(numbers))
        chain.accept(token)
        documented.accept(token)
        distributions.append(distribution)
    return np.array(distributions)


def checked_answer(script: Script = lambda data: None, **options: object) -> tuple[object, ...]:
    """Tokens, text, finish reason and log probabilities of a session's answer, which are as documented."""
    sampling = Sampling(**{"seed": 5, "max_tokens": 40, "temperature": 1.0, **options})
    generation = session_with_prompt(script).generate(sampling)
    logprobs = [event.logprobs for event in generation]
    answer = generation.answer
    tokens, text, finish_reason, documented_logprobs = documented_answer(script, sampling)
    assert (answer.tokens, answer.text, answer.finish_reason) == (tuple(tokens), text, finish_reason)
    for actual, documented in zip(logprobs, documented_logprobs, strict=True):
        if actual is None or documented is None:
            assert actual is documented
            continue
        for n_likeliest, expected in zip((actual.model, actual.sampled), documented[:2], strict=True):
            assert [token for token, _ in n_likeliest] == [token for token, _ in expected]
            assert [value for _, value in n_likeliest] == pytest.approx([value for _, value in expected], abs=TOLERANCE)
        assert actual.chosen == pytest.approx(documented[2], abs=TOLERANCE)
    return answer.tokens, answer.text, answer.finish_reason, logprobs


def documented_answer(
    script: Script, sampling: Sampling
) -> tuple[list[int], str, FinishReason, list[DocumentedLogprobs]]:
    """Tokens, text, finish reason and log probabilities of the answer, computed token by token."""
    session, tokens, logprobs = session_with_prompt(script), [], []
    chain, numbers = (
        DocumentedChain(sampling, ByteVocab(), list(session.tokens)),
        uniform_numbers(sampling.seed, stream=0),
    )
    while True:
        row = session.next_logits()
        probs, n = chain.distribution(row), sampling.logprobs
        tokens.append(drawn(probs, next(numbers)))
        model = softmax(row.astype(np.float64))
        logprobs.append(None if n is None else (likeliest(model, n), likeliest(probs, n), math.log(probs[tokens[-1]])))
        text = ByteVocab().decode(tokens)
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        if tokens[-1] == END or stops:
            return tokens, text[: min(stops, default=None)], FinishReason.STOP, logprobs
        if len(tokens) == sampling.max_tokens:
            return tokens, text, FinishReason.LENGTH, logprobs
        chain.accept(tokens[-1])
        session.append_tokens(tokens[-1:])


def session_with_prompt(script: Script) -> Session:
    """A session with a prompt."""
    session = Session(ScriptedContext(script, n_ctx=200), ByteVocab())
    session.append("abcabcab: abcab")
    return session


def answer_that_ends_at_once(**options: object) -> tuple[object, ...]:
    """The checked answer of a model that gives the EOG token a high logit from the first token on."""
    return checked_answer(lambda data: END, **{"max_tokens": 8, "temperature": 0.0, **options})


DRY = {"dry_multiplier": 0.8}
MIROSTAT = {"mirostat": 2, "mirostat_tau": 3.0}

CASES: Mapping[str, tuple[Behaviour, Mapping[str, object], object]] = {
    "logit_bias": (checked_distributions, {}, {65: 3.0}),
    "banned_tokens": (checked_distributions, {}, (65, 66)),
    "eog_bias": (answer_that_ends_at_once, {}, -math.inf),
    "min_tokens": (answer_that_ends_at_once, {}, 5),
    "repeat_penalty": (checked_distributions, {}, 1.3),
    "frequency_penalty": (checked_distributions, {}, 0.4),
    "presence_penalty": (checked_distributions, {}, 0.4),
    "penalty_window": (checked_distributions, {"frequency_penalty": 0.4}, None),
    "dry_multiplier": (checked_distributions, {}, 0.8),
    "dry_base": (checked_distributions, DRY, 1.3),
    "dry_allowed_length": (checked_distributions, DRY, 5),
    "dry_window": (checked_distributions, {**DRY, "dry_breakers": ()}, 12),
    "dry_breakers": (checked_distributions, DRY, ("o",)),
    "no_repeat_ngram": (checked_distributions, {}, 3),
    "top_n_sigma": (checked_distributions, {}, 1.0),
    "top_k": (checked_distributions, {}, 10),
    "typical_p": (checked_distributions, {}, 0.5),
    "top_p": (checked_distributions, {}, 0.6),
    "min_p": (checked_distributions, {}, 0.2),
    "top_a": (checked_distributions, {}, 0.5),
    "epsilon_cutoff": (checked_distributions, {}, 0.01),
    "eta_cutoff": (checked_distributions, {}, 0.01),
    "xtc_probability": (checked_distributions, {}, 1.0),
    "xtc_threshold": (checked_distributions, {"xtc_probability": 1.0}, 0.02),
    "temperature": (checked_distributions, {}, 0.5),
    "dynatemp_range": (checked_distributions, {}, 0.5),
    "dynatemp_exponent": (checked_distributions, {"dynatemp_range": 0.5}, 2.0),
    "adaptive_entropy": (checked_distributions, {}, 4.12),
    "adaptive_decay": (checked_distributions, {"adaptive_entropy": 4.12}, 0.2),
    "mirostat": (checked_distributions, {"mirostat_tau": 3.0, "mirostat": 1}, 2),
    "mirostat_tau": (checked_distributions, {"mirostat": 2}, 2.0),
    "mirostat_eta": (checked_distributions, MIROSTAT, 0.7),
    "min_keep": (checked_distributions, {"top_p": 0.1}, 20),
    "order": (checked_distributions, {"top_p": 0.6, "temperature": 0.5}, ("temperature", "top_p")),
    "logprobs": (checked_answer, {}, 3),
    "seed": (checked_answer, {}, 6),
    "max_tokens": (checked_answer, {}, 7),
    "stop": (checked_answer, {}, ("\x00", *map(chr, range(32, 127)))),
}
"""For each option: the checked behaviour, the other options of the case, and a value that is not the default."""

ELSEWHERE = {"custom": "tests/sampling/test_custom_steps.py"}
"""Options whose effect is tested in another file."""


def test_every_option_has_a_behavioural_test() -> None:
    options = {field.name for field in dataclasses.fields(Sampling)}
    assert options == set(CASES) | set(ELSEWHERE)


@pytest.mark.parametrize("option", CASES)
def test_each_option_does_what_is_documented(option: str) -> None:
    behaviour, others, value = CASES[option]
    with_option, without = behaviour(**{**others, option: value}), behaviour(**others)
    assert not np.array_equal(with_option, without) if behaviour is checked_distributions else with_option != without


def test_the_limits_of_every_option_are_tested() -> None:
    assert set(LIMITS) == {field.name for field in dataclasses.fields(Sampling)}


SAME: list[tuple[dict[str, object], dict[str, object]]] = [
    # transformers
    ({"max_new_tokens": 9}, {"max_tokens": 9}),
    ({"min_new_tokens": 3}, {"min_tokens": 3}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": True, "temperature": 0.4}, {"temperature": 0.4}),
    ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
    ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
    ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram": 3}),
    ({"suppress_tokens": [5, 4]}, {"banned_tokens": (4, 5)}),
    ({"bad_words_ids": [[5], [4]]}, {"banned_tokens": (4, 5)}),
    ({"stop_strings": "x"}, {"stop": ("x",)}),
    # OpenAI
    ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"logit_bias": {"50": -100}}, {"logit_bias": {50: -100}}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"logprobs": False}, {}),
    ({"logprobs": 5}, {"logprobs": 5}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    # llama.cpp
    ({"n_predict": -1}, {"max_tokens": None}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"temp": 0.9}, {"temperature": 0.9}),
    ({"seed": -1}, {"seed": None}),
    ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5, 6: -math.inf}}),
    ({"repeat_last_n": -1, "repeat_penalty": 1.1}, {"penalty_window": None, "repeat_penalty": 1.1}),
    ({"penalty_last_n": 9, "repeat_penalty": 1.1}, {"penalty_window": 9, "repeat_penalty": 1.1}),
    ({"typical": 0.9}, {"typical_p": 0.9}),
    ({"typ_p": 0.9}, {"typical_p": 0.9}),
    ({"top_n_sigma": -1}, {}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"dynatemp_range": 0.2, "dynatemp_exp": 2.0}, {"dynatemp_range": 0.2, "dynatemp_exponent": 2.0}),
    ({"dry_multiplier": 1, "dry_penalty_last_n": -1}, {"dry_multiplier": 1}),
    ({"dry_multiplier": 1, "dry_sequence_breakers": ["x"]}, {"dry_multiplier": 1, "dry_breakers": ("x",)}),
    ({"ignore_eos": True}, {"eog_bias": -math.inf}),
    ({"ignore_eos": False}, {}),
    ({"n_probs": 2}, {"logprobs": 2}),
    (
        {"samplers": ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"]},
        {"order": ("penalties", "top_k", "typical_p", "top_p", "min_p", "temperature")},
    ),
    ({"penalty_repeat": 1.2}, {"repeat_penalty": 1.2}),
    ({"penalty_freq": 0.2, "penalty_present": 0.3}, {"frequency_penalty": 0.2, "presence_penalty": 0.3}),
    (
        {"mirostat_mode": 2, "mirostat_lr": 0.3, "mirostat_ent": 4, "top_k": 0, "top_p": 1, "min_p": 0},
        {"mirostat": 2, "mirostat_eta": 0.3, "mirostat_tau": 4, "top_k": 0, "top_p": 1, "min_p": 0},
    ),
    # two names with the same value
    ({"max_tokens": 4, "n_predict": 4}, {"max_tokens": 4}),
    ({"stop": "x", "stop_strings": ["x"]}, {"stop": ("x",)}),
    (
        {"logit_bias": {"5": -1}, "banned_tokens": [3], "suppress_tokens": {3}},
        {"logit_bias": {5: -1}, "banned_tokens": (3,)},
    ),
]


@pytest.mark.parametrize(("given_as", "means"), SAME, ids=str)
def test_aliases_mean_the_same(given_as: dict[str, object], means: dict[str, object]) -> None:
    assert Sampling.create(**given_as) == Sampling.from_dict(given_as) == Sampling(**means)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True, "temperature": 0},
        {"do_sample": "yes"},
        {"max_tokens": 4, "max_new_tokens": 5},
        {"repetition_penalty": 1.1, "repeat_penalty": 1.2},
        {"logprobs": False, "top_logprobs": 3},
        {"bad_words_ids": [[1, 2]]},
        {"ignore_eos": 1},
        {"logit_bias": [["text", 1.0]]},
    ],
    ids=str,
)
def test_contradicting_aliases_raise(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="|".join(options)):
        Sampling.create(**options)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"temperature": 1e31}, "a number from 0.0 to 1e+30"),
        ({"repeat_penalty": math.inf}, "a number above 0.0 to 1e+30"),
        ({"presence_penalty": -1e31}, "a number from -1e+30 to 1e+30"),
        ({"logit_bias": {5: 1e38}}, "a number from -1e+30 to 1e+30, or -inf"),
        ({"eog_bias": math.inf}, "a number from -1e+30 to 1e+30, or -inf"),
        ({"eog_bias": math.nan}, "a number, or -inf"),
        ({"top_p": 1e31}, "a number from 0.0 to 1.0"),
    ],
    ids=str,
)
def test_the_error_about_a_number_that_is_too_large_names_the_largest(
    options: dict[str, object], accepted: str
) -> None:
    with pytest.raises(InvalidOption, match=re.escape(f"(accepted: {accepted})")):
        Sampling.create(**options)


def test_every_alias_has_a_case() -> None:
    assert set(SPELLINGS) == {name for given_as, _ in SAME for name in given_as if name in SPELLINGS}


def test_an_error_names_the_alias_that_was_used() -> None:
    with pytest.raises(InvalidOption, match=r"^n_predict=-2 \(accepted: an integer from 0 on\)"):
        Sampling.create(n_predict=-2)


def test_an_unknown_option_lists_the_accepted_options() -> None:
    with pytest.raises(UnknownOption, match=r"temprature.*accepted.*temperature"):
        Sampling.create(temprature=1)


def test_presets() -> None:
    assert Sampling.preset("balanced") == Sampling()
    assert Sampling.preset("neutral").steps == ()
    assert Sampling.preset("precise", temp=0.5) == Sampling(temperature=0.5, top_p=0.9, min_p=0.1)
    row = np.array([0.0, 2.0, 1.9], np.float32)
    assert SamplerChain(Sampling.preset("greedy")).distribution(row)[0].tolist() == [1]
    with pytest.raises(InvalidOption, match=r"'wild' \(accepted: greedy, precise, balanced, creative, neutral\)"):
        Sampling.preset("wild")


def test_presets_are_ordered_by_entropy() -> None:
    """The entropy of the distribution grows from preset to preset, for every row."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        row = (2 * rng.standard_normal(500)).astype(np.float32)
        entropies = []
        for name in ("greedy", "precise", "balanced", "creative", "neutral"):
            chain = SamplerChain(dataclasses.replace(Sampling.preset(name), xtc_probability=0.0))
            p = chain.distribution(row)[1]
            entropies.append(float(-(p * np.log(p)).sum()))
        assert entropies == sorted(entropies)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repeat_penalty", "temperature"])
def test_integers_that_numpy_lacks_are_numbers(name: str) -> None:
    values = [
        {name: number, "penalty_window": 8} if "penalty" in name else {name: number} for number in (2**64, 2.0**64)
    ]
    rows = []
    for options in values:
        chain = SamplerChain(Sampling(**options, seed=1))
        chain.accept(3)
        rows.append(chain.distribution(np.arange(8, dtype=np.float32)))
    assert [each.tolist() for each in rows[0]] == [each.tolist() for each in rows[1]]


def test_options_survive_json() -> None:
    options = Sampling(
        logit_bias={5: -math.inf, 7: 1.5}, eog_bias=-math.inf, stop=("x", "y"), order=ORDER, seed=9, max_tokens=5
    )
    assert Sampling.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert hash(options) == hash(dataclasses.replace(options))


def test_the_order_lists_every_built_in_step_once() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert Sampling(order=ORDER).steps == Sampling().steps


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "7", "top_k", "-inf"])
JSON = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.sampled_from(["", "7", "top_k"]), LEAVES, max_size=2)
NAMES = [*typing.get_type_hints(Sampling), "do_sample", "samplers", "bad_words_ids", "logprobs", "n_predict"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_untrusted_options_are_read_or_refused(values: dict[str, object]) -> None:
    try:
        options = Sampling.from_dict(values)
    except OptionError as error:
        assert "\n" not in str(error) or "\\n" in repr(values), "errors have one line"
        return
    assert Sampling.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def test_messages_name_the_limit_and_stay_short() -> None:
    with pytest.raises(
        InvalidOption, match=r"^seed=9223372036854775808 \(accepted: an integer from 0 to 9223372036854775807\)$"
    ):
        Sampling(seed=2**63)
    with pytest.raises(InvalidOption, match=r"^seed=-1 \(accepted: an integer from 0 on\)$"):
        Sampling(seed=-1)
    with pytest.raises(InvalidOption) as raised:
        Sampling(stop=("x" * 100_000, ""))
    assert len(str(raised.value)) < 200
    with pytest.raises(InvalidOption, match=r"^seed=an integer of thousands of digits \(accepted"):
        Sampling(seed=10**5000)

"""Other spellings of the sampling options, and presets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from slm_core.errors import InvalidOption, UnknownOption
from slm_core.numerics import shown
from slm_core.sampling.checks import READERS

PRESETS: Mapping[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0.0},
    "precise": {"temperature": 0.3, "top_p": 0.9, "min_p": 0.1},
    "balanced": {},
    "creative": {"temperature": 1.1, "top_k": 0, "top_p": 1.0, "xtc_probability": 0.3},
    "neutral": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}
"""The options of the presets that differ from the defaults; see docs/sampling.md."""

SPELLINGS: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "penalty_repeat": "repeat_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
    "repeat_last_n": "penalty_window",
    "penalty_last_n": "penalty_window",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "typical": "typical_p",
    "typ_p": "typical_p",
    "dynatemp_exp": "dynatemp_exponent",
    "mirostat_mode": "mirostat",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "dry_penalty_last_n": "dry_window",
    "dry_sequence_breakers": "dry_breakers",
    "suppress_tokens": "banned_tokens",
    "bad_words_ids": "banned_tokens",
    "ignore_eos": "eog_bias",
    "stop_strings": "stop",
    "samplers": "order",
    "top_logprobs": "logprobs",
    "n_probs": "logprobs",
}
"""Spellings of transformers, OpenAI and llama.cpp, and the names in this library."""


def canonical(arguments: Mapping[str, object], accepted: Sequence[str]) -> dict[str, object]:
    """The options by their names in this library.

    Raises:
        UnknownOption: an unknown option.
        InvalidOption: two spellings disagree, or a value has no counterpart here.
    """
    options: dict[str, tuple[str, object]] = {}
    for spelling, value in arguments.items():
        name = SPELLINGS.get(spelling, spelling)
        if name not in accepted:
            raise UnknownOption(f"unknown sampling option {spelling!r} (accepted: {', '.join(sorted(accepted))})")
        value = _MEANINGS[spelling](spelling, value) if spelling in _MEANINGS else value
        if value is _UNCHANGED:
            continue
        value = READERS[name](spelling, value)
        if name in options and options[name][1] != value:
            earlier = options[name][0]
            raise InvalidOption(f"{spelling}={arguments[spelling]!r} contradicts {earlier}={arguments[earlier]!r}")
        options[name] = (spelling, value)
    _check_switches(arguments, options)
    return {name: value for name, (_, value) in options.items()}


_UNCHANGED = object()
"""The meaning of a value that leaves the option as it is."""


def _check_switches(arguments: Mapping[str, object], options: dict[str, tuple[str, object]]) -> None:
    """Resolve the switches ``do_sample`` and ``logprobs`` with the other options."""
    if arguments.get("do_sample") is True and options.get("temperature", ("", 1))[1] == 0:
        raise InvalidOption("do_sample=True contradicts temperature=0")
    if arguments.get("logprobs") is False and arguments.get("top_logprobs"):
        raise InvalidOption(f"logprobs=False contradicts top_logprobs={arguments['top_logprobs']!r}")
    if arguments.get("logprobs") is True:
        options.setdefault("logprobs", ("logprobs", 0))


def _do_sample(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name}={shown(value)} (accepted: True, False)")
    return _UNCHANGED if value else 0.0


def _ignore_eos(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name}={shown(value)} (accepted: True, False)")
    return -math.inf if value else _UNCHANGED


def _minus_one_is(meaning: object) -> Callable[[str, object], object]:
    return lambda name, value: meaning if value == -1 else value


def _logprobs(name: str, value: object) -> object:
    """In OpenAI's chat API ``logprobs`` is a switch and ``top_logprobs`` the number."""
    return _UNCHANGED if isinstance(value, bool) else value


def _single_tokens(name: str, value: object) -> object:
    """In transformers these are lists of tokens; here, tokens."""
    if not isinstance(value, Sequence) or not all(isinstance(run, Sequence) and len(run) == 1 for run in value):
        raise InvalidOption(f"{name}={shown(value)} (accepted: a list of lists of one token id each)")
    return tuple(sorted({run[0] for run in value}))


def _bias_pairs(name: str, value: object) -> object:
    """In llama.cpp also a list of pairs, in which False bans."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], int) for pair in value):
        raise InvalidOption(
            f"{name}={shown(value)} (accepted: a mapping, or a list of pairs, from token ids to numbers)"
        )
    return {token: -math.inf if bias is False else bias for token, bias in value}


def _samplers(name: str, value: object) -> object:
    """llama.cpp has a short name for one step."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple("typical_p" if step == "typ_p" else step for step in value) if several else value  # type: ignore[attr-defined]  # a sequence


_MEANINGS: Mapping[str, Callable[[str, object], object]] = {
    "do_sample": _do_sample,
    "ignore_eos": _ignore_eos,
    "n_predict": _minus_one_is(None),
    "repeat_last_n": _minus_one_is(None),
    "penalty_last_n": _minus_one_is(None),
    "dry_penalty_last_n": _minus_one_is(None),
    "top_n_sigma": _minus_one_is(0.0),
    "top_k": _minus_one_is(0),
    "seed": _minus_one_is(None),
    "logit_bias": _bias_pairs,
    "samplers": _samplers,
    "bad_words_ids": _single_tokens,
    "logprobs": _logprobs,
}
"""Spellings whose values have to be converted."""

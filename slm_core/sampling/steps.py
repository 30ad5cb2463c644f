"""Builds the steps of a chain from the options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from slm_core.errors import InvalidOption, SamplingError
from slm_core.plugins import registry
from slm_core.sampling import logit_bias, penalties, temperatures, truncation
from slm_core.sampling.candidates import Candidates, Ids, Values
from slm_core.sampling.options import Sampling
from slm_core.sampling.order import ORDER, TRUNCATION
from slm_core.sampling.state import Step, StepState

_KEEP_THE_BEST = frozenset(TRUNCATION) - {"typical_p"}
"""Steps that keep the likeliest token: greedy choice skips them."""

MOST_RANKED = 1024
"""The largest number of candidates for which ranking all of them is faster than searching them in each step."""


@dataclass(frozen=True, slots=True)
class Known:
    """Properties of a vocabulary that steps need.

    Attributes:
        eog_ids: the EOG tokens; None if unknown.
        breaker_ids: the tokens that contain a text of ``dry_breakers``; None if not computed.
        n_vocab: the size V of the vocabulary; None if unknown.
    """

    eog_ids: Collection[int] | None = None
    breaker_ids: Collection[int] | None = field(default=None, repr=False)
    n_vocab: int | None = None


def build_steps(sampling: Sampling, known: Known) -> list[tuple[str, Step]]:
    """The active steps, by name, in the order in which they run.

    Raises:
        InvalidOption: a step needs more properties of the vocabulary, or an option of a plugin's step is invalid.
        PluginError: a plugin's step cannot be imported.
    """
    names = list(sampling.steps)
    if sampling.temperature == 0:
        while (greedy := names.index("temperature")) and names[greedy - 1] in _KEEP_THE_BEST:
            del names[greedy - 1]
    steps = [(name, _BUILDERS[name](sampling, known) if name in ORDER else _custom(sampling, name)) for name in names]
    return _fuse_truncation(sampling, steps) if 0 < sampling.top_k <= MOST_RANKED and "top_k" in names else steps


def _fuse_truncation(sampling: Sampling, steps: list[tuple[str, Step]]) -> list[tuple[str, Step]]:
    """The steps, with top_k and a top_p and min_p directly after it fused into one step."""
    names = [name for name, _ in steps]
    start = names.index("top_k")
    end = start + 1
    for name in ("top_p", "min_p"):
        end += names[end : end + 1] == [name]
    joined = partial(
        truncation.top_k_top_p_min_p,
        k=sampling.top_k,
        p=sampling.top_p if "top_p" in names[start:end] else 1.0,
        min_p=sampling.min_p if "min_p" in names[start:end] else 0.0,
        min_keep=sampling.min_keep,
    )
    return [*steps[:start], ("top_k", joined), *steps[end:]]


def history_window(sampling: Sampling) -> int | None:
    """The number of last tokens that the steps read; None for all."""
    steps = sampling.steps
    if "no_repeat_ngram" in steps or any(step not in ORDER for step in steps):
        return None
    windows = [
        *([sampling.penalty_window] if "penalties" in steps else []),
        *([sampling.dry_window] if "dry" in steps else []),
    ]
    return None if None in windows else max((window for window in windows if window is not None), default=0)


def _logit_bias(s: Sampling, known: Known) -> Step:
    bias = {**s.logit_bias, **dict.fromkeys(s.banned_tokens, -np.inf)}
    tokens = np.array(sorted(bias), np.int64)
    if known.n_vocab is not None and tokens[-1] >= known.n_vocab:
        raise InvalidOption(
            f"logit_bias or banned_tokens names token {tokens[-1]} (accepted: 0 to {known.n_vocab - 1})"
        )
    return partial(logit_bias.logit_bias, tokens=tokens, biases=np.array([bias[token] for token in tokens.tolist()]))


def _end_of_answer(s: Sampling, known: Known) -> Step:
    if known.eog_ids is None:
        raise InvalidOption("min_tokens and eog_bias need the tokens that end an answer: SamplerChain.for_vocab")
    eog_ids = np.array(sorted(known.eog_ids), np.int64)
    return partial(logit_bias.end_of_answer, eog_ids=eog_ids, bias=s.eog_bias, min_tokens=s.min_tokens)


def _penalties(s: Sampling, known: Known) -> Step:
    return partial(
        penalties.penalties,
        repeat=s.repeat_penalty,
        frequency=s.frequency_penalty,
        presence=s.presence_penalty,
        window=s.penalty_window,
    )


def _dry(s: Sampling, known: Known) -> Step:
    ids = {breaker for breaker in s.dry_breakers if isinstance(breaker, int)}
    if len(ids) < len(set(s.dry_breakers)) and known.breaker_ids is None:
        raise InvalidOption(f"dry_breakers={s.dry_breakers!r} need a vocabulary: SamplerChain.for_vocab, or token ids")
    breakers = np.array(sorted(ids.union(known.breaker_ids or ())), np.int64)
    is_breaker = np.zeros(max(breakers, default=-1) + 2, bool)
    is_breaker[breakers] = True
    return partial(
        penalties.dry,
        multiplier=s.dry_multiplier,
        base=s.dry_base,
        allowed_length=s.dry_allowed_length,
        window=s.dry_window,
        is_breaker=is_breaker,
    )


def _temperature(s: Sampling, known: Known) -> Step:
    return partial(
        temperatures.temperature,
        temperature=s.temperature,
        spread=s.dynatemp_range,
        exponent=s.dynatemp_exponent,
    )


def _mirostat(s: Sampling, known: Known) -> Step:
    return partial(temperatures.mirostat_1 if s.mirostat == 1 else temperatures.mirostat_2, tau=s.mirostat_tau)


_Builder: TypeAlias = Callable[[Sampling, Known], Step]

_BUILDERS: Mapping[str, _Builder] = {
    "logit_bias": _logit_bias,
    "end_of_answer": _end_of_answer,
    "penalties": _penalties,
    "dry": _dry,
    "no_repeat_ngram": lambda s, known: partial(penalties.no_repeat_ngram, size=s.no_repeat_ngram),
    "top_n_sigma": lambda s, known: partial(truncation.top_n_sigma, n=s.top_n_sigma, min_keep=s.min_keep),
    "top_k": lambda s, known: partial(truncation.top_k, k=s.top_k),
    "typical_p": lambda s, known: partial(truncation.typical_p, p=s.typical_p, min_keep=s.min_keep),
    "top_p": lambda s, known: partial(truncation.top_p, p=s.top_p, min_keep=s.min_keep),
    "min_p": lambda s, known: partial(truncation.min_p, p=s.min_p, min_keep=s.min_keep),
    "top_a": lambda s, known: partial(truncation.top_a, a=s.top_a, min_keep=s.min_keep),
    "epsilon_cutoff": lambda s, known: partial(
        truncation.epsilon_cutoff, epsilon=s.epsilon_cutoff, min_keep=s.min_keep
    ),
    "eta_cutoff": lambda s, known: partial(truncation.eta_cutoff, epsilon=s.eta_cutoff, min_keep=s.min_keep),
    "xtc": lambda s, known: partial(
        truncation.xtc, probability=s.xtc_probability, threshold=s.xtc_threshold, min_keep=s.min_keep
    ),
    "temperature": _temperature,
    "adaptive": lambda s, known: partial(temperatures.adaptive, target=s.adaptive_entropy, decay=s.adaptive_decay),
    "mirostat": _mirostat,
}


def _custom(sampling: Sampling, name: str) -> Step:
    options = sampling.custom.get(name, {})
    try:
        step = cast("Step", registry().sampler_step(name)(**options))
    except TypeError as error:
        raise InvalidOption(f"options {options!r} of sampler step {name!r}: {error}") from error

    def checked(ids: Ids, logits: Values, state: StepState) -> Candidates:
        result = step(ids, logits, state)
        new_ids, new_logits = np.asarray(result[0]), np.asarray(result[1])
        indices = np.searchsorted(ids, new_ids)
        subset = bool((indices < len(ids)).all() and (ids[indices] == new_ids).all() and (np.diff(new_ids) > 0).all())
        if not subset or len(new_ids) != len(new_logits) or not np.isfinite(new_logits).all():
            raise SamplingError(
                f"sampler step {name!r} gave {len(new_ids)} ids and {len(new_logits)} logits (accepted: ascending ids"
                " out of its candidates, each with a finite logit)"
            )
        return new_ids, new_logits

    return checked


def breaker_tokens(breakers: Collection[str | int], token_bytes: Sequence[bytes]) -> frozenset[int]:
    """The tokens that contain one of the texts.

    Args:
        breakers: texts; ids among them are left out.
        token_bytes: the bytes of every token, by id.

    Raises:
        InvalidOption: no token contains a text of several bytes, so it would never break a repetition.
    """
    texts = [text.encode("utf-8", "surrogatepass") for text in breakers if isinstance(text, str)]
    if not texts:
        return frozenset()
    any_text = re.compile(b"|".join(map(re.escape, texts)))
    breaking = frozenset(token for token, data in enumerate(token_bytes) if any_text.search(data))
    for text in texts:
        if len(text) > 1 and not any(text in token_bytes[token] for token in breaking):
            shown = text.decode("utf-8", "surrogatepass")
            raise InvalidOption(
                f"dry_breakers has {shown!r}, which no token of the vocabulary holds (give a shorter text)"
            )
    return breaking

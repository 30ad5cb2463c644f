"""Log-probabilities for people: of the model, and of what the sampler drew from."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.generation.events import Logprobs
from slm_core.numerics import log_sum_exp
from slm_core.protocols import Sampler
from slm_core.sampling import SamplerChain
from slm_core.sampling.candidates import Values, largest

Likeliest: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens and natural logarithms of their probabilities, likeliest first."""


def wanted_logprobs(sampler: Sampler) -> SamplerChain | None:
    """The sampler, where it is a chain whose options ask for log-probabilities."""
    chain = sampler if isinstance(sampler, SamplerChain) else None
    return chain if chain is not None and chain.sampling.logprobs is not None else None


def logprobs_of(chain: SamplerChain, logits: NDArray[np.float32], token: int) -> Logprobs:
    """What ``Sampling.logprobs`` asks for, of a token that was chosen and has yet to be accepted.

    Args:
        chain: what chose it; where it was forced, there is nothing it was drawn from.
        logits: the model's row, float32 [V], that it was chosen from.
        token: the token.
    """
    n = chain.sampling.logprobs or 0
    model = likeliest(np.arange(len(logits)), logits - log_sum_exp(logits), n)
    if chain.drawn_from is None:
        return Logprobs(model)
    ids, probs = chain.drawn_from
    with np.errstate(divide="ignore"):
        logprobs = np.log(probs)
    place = int(np.searchsorted(ids, token))
    held = place < len(ids) and ids[place] == token
    return Logprobs(model, likeliest(ids, logprobs, n), float(logprobs[place]) if held else -math.inf)


def likeliest(ids: NDArray[np.int64], logprobs: Values, n: int) -> Likeliest:
    """The ``n`` likeliest, likeliest first; of equal ones, the lower id."""
    if n == 0:
        return ()
    places = largest(logprobs, n)
    places = places[np.argsort(-logprobs[places], kind="stable")]
    return tuple(zip(ids[places].tolist(), logprobs[places].tolist(), strict=True))

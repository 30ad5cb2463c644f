"""Log-probabilities for users: of the model, and of the distribution that the sampler drew from."""

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
    """The sampler, if it is a chain whose options request log-probabilities; else None."""
    chain = sampler if isinstance(sampler, SamplerChain) else None
    return chain if chain is not None and chain.sampling.logprobs is not None else None


def logprobs_of(chain: SamplerChain, logits: NDArray[np.float32], token: int) -> Logprobs:
    """The log-probabilities of a step; call it before the sampler accepts the token.

    Args:
        chain: the sampler that chose the token.
        logits: the model's row, float32 [V].
        token: the chosen or forced token.
    """
    n = chain.sampling.logprobs or 0
    model = likeliest(np.arange(len(logits)), logits - log_sum_exp(logits), n)
    if chain.drawn_from is None:
        return Logprobs(model)
    ids, probs = chain.drawn_from
    with np.errstate(divide="ignore"):
        logprobs = np.log(probs)
    index = int(np.searchsorted(ids, token))
    is_candidate = index < len(ids) and ids[index] == token
    return Logprobs(model, likeliest(ids, logprobs, n), float(logprobs[index]) if is_candidate else -math.inf)


def likeliest(ids: NDArray[np.int64], logprobs: Values, n: int) -> Likeliest:
    """The ``n`` likeliest tokens, likeliest first; ties: lower id first."""
    if n == 0:
        return ()
    indices = largest(logprobs, n)
    indices = indices[np.argsort(-logprobs[indices], kind="stable")]
    return tuple(zip(ids[indices].tolist(), np.minimum(logprobs[indices], 0).tolist(), strict=True))

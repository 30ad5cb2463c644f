"""Steps that make the distribution sharper or flatter, and mirostat, which adapts to earlier tokens."""

from __future__ import annotations

import math

import numpy as np

from slm_core.numerics import log_sum_exp
from slm_core.sampling.candidates import Candidates, Ids, Values, entropy, keep, largest, take
from slm_core.sampling.checks import MIN_TEMPERATURE
from slm_core.sampling.state import StepState

MU = "mirostat_mu"
_MEAN_ENTROPY = "adaptive_mean_entropy"
_N_ZIPF = 100


def temperature(
    ids: Ids, logits: Values, state: StepState, *, temperature: float, spread: float, exponent: float
) -> Candidates:
    """Divide the logits by the temperature; 0 keeps only the likeliest token.

    With a ``spread`` the temperature is ``low + (high - low) * (H / log n) ** exponent``, from ``temperature - spread``
    (at least 0) to ``temperature + spread`` (kalomaze, dynamic temperature, as in llama.cpp).
    """
    if spread and len(ids) > 1:
        low = max(0.0, temperature - spread)
        share = max(0.0, entropy(logits)) / math.log(len(ids))
        temperature = low + (temperature + spread - low) * share**exponent
    if temperature < MIN_TEMPERATURE:
        return take(ids, logits, np.array([logits.argmax()]))
    return ids, logits / temperature


def adaptive(ids: Ids, logits: Values, state: StepState, *, target: float, decay: float) -> Candidates:
    """Divide the logits by ``min(1, target / mean)``; ``mean`` is the running mean of the entropy, with this token."""
    current = entropy(logits)
    mean = decay * state.memory.get(_MEAN_ENTROPY, current) + (1 - decay) * current
    state.learned[_MEAN_ENTROPY] = mean
    return ids, logits * (mean / target) if mean > target else logits


def mirostat_1(ids: Ids, logits: Values, state: StepState, *, tau: float) -> Candidates:
    """Keep the k likeliest tokens: k is from a fitted Zipf law and the surprise mu (arXiv 2007.14966)."""
    if len(ids) < 2:
        return ids, logits
    ranked = np.sort(logits[largest(logits, _N_ZIPF)].astype(np.float64))[::-1]
    ranks = np.arange(1, len(ranked))
    t = np.log((ranks + 1) / ranks)
    s = float(np.dot(t, ranked[:-1] - ranked[1:]) / np.dot(t, t))
    k = _zipf_k(s, state.memory.get(MU, 2 * tau), state.n_vocab)
    return (ids, logits) if k >= len(ids) else take(ids, logits, largest(logits, max(int(k), 1)))


def _zipf_k(s: float, mu: float, n_vocab: int) -> float:
    """The number of tokens to keep if probabilities are proportional to rank to the power -s."""
    eps = s - 1
    if s <= 0:
        return math.inf
    norm = math.log(n_vocab) if abs(eps) < 1e-6 else -math.expm1(-eps * math.log(n_vocab)) / eps
    exponent = (mu * math.log(2) - math.log(norm)) / s
    return math.exp(min(exponent, 100.0))


def mirostat_2(ids: Ids, logits: Values, state: StepState, *, tau: float) -> Candidates:
    """Keep tokens whose surprise, in bits, is at most mu (arXiv 2007.14966)."""
    bound = state.memory.get(MU, 2 * tau) * math.log(2)
    return keep(ids, logits, logits >= log_sum_exp(logits) - bound, 1)


def next_mu(mu: float, surprise: float, *, tau: float, eta: float) -> float:
    """Mirostat's feedback: ``mu - eta * (surprise - tau)``, in bits."""
    return mu - eta * (surprise - tau)

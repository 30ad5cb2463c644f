"""The table of docs/sampling.md in plain NumPy: every step on a whole row of float64, one after another, unoptimized.

A removed token has the logit -inf. ``slm_core.sampling`` computes the same on candidates, with fused steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.protocols import Vocab
from slm_core.sampling import Sampling

Row: TypeAlias = NDArray[np.float64]
"""Logits or probabilities, float64 [V]."""

ORDER = (
    *("logit_bias", "end_of_answer", "penalties", "dry", "no_repeat_ngram", "top_n_sigma", "top_k", "typical_p"),
    *("top_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff", "xtc", "temperature", "adaptive", "mirostat"),
)
"""The rows of the table."""


@dataclass
class DocumentedChain:
    """A sampler chain with the formulas of docs/sampling.md.

    ``xtc_probability`` must be 0 or 1: between them, the result depends on random numbers.

    Attributes:
        margin: the smallest distance by which a step of the last distribution decided what to keep: of a token from a
            bound or from another token, in nats or as a probability. If it is within the rounding of float32, another
            implementation may decide otherwise. Equal logits do not count: ties go to the lower id.
    """

    sampling: Sampling
    vocab: Vocab
    history: list[int]
    n_said: int = 0
    mean_entropy: float | None = None
    mu: float | None = None
    probs: Row = field(default_factory=lambda: np.empty(0))
    margin: float = math.inf

    def distribution(self, row: NDArray[np.floating]) -> Row:
        """Probabilities, float64 [V]."""
        logits, self.margin = row.astype(np.float64), math.inf
        for name in self.sampling.order or ORDER:
            step: Callable[[Row], Row] = getattr(self, f"_{name}")
            logits = step(logits)
        self.probs = softmax(logits)
        return self.probs

    def accept(self, token: int) -> None:
        """Add a token to the history; mirostat corrects ``mu`` by its surprise."""
        s = self.sampling
        if s.mirostat:
            surprise = -math.log2(self.probs[token])
            self.mu = self._target_surprise() - s.mirostat_eta * (surprise - s.mirostat_tau)
        self.history.append(token)
        self.n_said += 1

    def _logit_bias(self, logits: Row) -> Row:
        for token, bias in self.sampling.logit_bias.items():
            logits[token] += bias
        logits[list(self.sampling.banned_tokens)] = -np.inf
        return logits

    def _end_of_answer(self, logits: Row) -> Row:
        for token in self.vocab.eog_ids:
            logits[token] = (
                -np.inf if self.n_said < self.sampling.min_tokens else logits[token] + self.sampling.eog_bias
            )
        return logits

    def _penalties(self, logits: Row) -> Row:
        s = self.sampling
        recent = self.history[-s.penalty_window :] if s.penalty_window else self.history
        for token in set(recent):
            logits[token] *= s.repeat_penalty if logits[token] < 0 else 1 / s.repeat_penalty
            logits[token] -= recent.count(token) * s.frequency_penalty + s.presence_penalty
        return logits

    def _dry(self, logits: Row) -> Row:
        s = self.sampling
        if not s.dry_multiplier:
            return logits
        recent, breakers = self.history[-s.dry_window :] if s.dry_window else self.history, self._breakers
        longest: dict[int, int] = {}
        for end in range(1, len(recent)):  # the repetition ends before the token at ``end``
            length = 0
            while length < end and recent[end - 1 - length] == recent[-1 - length] not in breakers:
                length += 1
            longest[recent[end]] = max(length, longest.get(recent[end], 0))
        for token, length in longest.items():
            if length >= s.dry_allowed_length and token not in breakers:
                logits[token] -= s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
        return logits

    @functools.cached_property
    def _breakers(self) -> frozenset[int]:
        return frozenset(token for token in range(self.vocab.size) if self._breaks(token))

    def _breaks(self, token: int) -> bool:
        data = self.vocab.token_bytes(token, special=True)
        return any(
            token == text if isinstance(text, int) else text.encode() in data for text in self.sampling.dry_breakers
        )

    def _no_repeat_ngram(self, logits: Row) -> Row:
        n, history = self.sampling.no_repeat_ngram, self.history
        if n:
            ngrams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
            banned = [token for token in range(len(logits)) if (*history[len(history) - n + 1 :], token) in ngrams]
            logits[banned] = -np.inf
        return logits

    def _top_n_sigma(self, logits: Row) -> Row:
        n, present = self.sampling.top_n_sigma, logits[logits > -np.inf]
        return self._keep(logits, logits, float(present.max() - n * present.std())) if n else logits

    def _top_k(self, logits: Row) -> Row:
        return self._first(logits, -logits, self.sampling.top_k) if self.sampling.top_k else logits

    def _typical_p(self, logits: Row) -> Row:
        if self.sampling.typical_p == 1:
            return logits
        return self._until(logits, np.abs(-log_softmax(logits) - entropy(logits)), self.sampling.typical_p)

    def _top_p(self, logits: Row) -> Row:
        return self._until(logits, -logits, self.sampling.top_p) if self.sampling.top_p < 1 else logits

    def _min_p(self, logits: Row) -> Row:
        if not self.sampling.min_p:
            return logits
        logp = log_softmax(logits)
        return self._keep(logits, logp, math.log(self.sampling.min_p) + float(logp.max()))

    def _top_a(self, logits: Row) -> Row:
        if not self.sampling.top_a:
            return logits
        logp = log_softmax(logits)
        return self._keep(logits, logp, math.log(self.sampling.top_a) + 2 * float(logp.max()))

    def _epsilon_cutoff(self, logits: Row) -> Row:
        if not self.sampling.epsilon_cutoff:
            return logits
        return self._keep(logits, log_softmax(logits), math.log(self.sampling.epsilon_cutoff))

    def _eta_cutoff(self, logits: Row) -> Row:
        epsilon = self.sampling.eta_cutoff
        if not epsilon:
            return logits
        bound = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy(logits)))
        return self._keep(logits, log_softmax(logits), math.log(bound))

    def _xtc(self, logits: Row) -> Row:
        if self.sampling.xtc_probability != 1:
            return logits
        logp = log_softmax(logits)
        self._record_margin(logp - math.log(self.sampling.xtc_threshold))
        above = [token for token in range(len(logp)) if logp[token] >= math.log(self.sampling.xtc_threshold)]
        if len(above) >= 2:
            least = min(above, key=lambda token: float(logp[token]))
            self._record_margin(np.diff(np.sort(logp[above])[:2]))
            above.remove(least)
            if int((logits > -np.inf).sum()) - len(above) >= self.sampling.min_keep:
                logits[above] = -np.inf
        return logits

    def _temperature(self, logits: Row) -> Row:
        s = self.sampling
        if s.temperature == 0:
            return self._first(logits, -logits, 1)
        if not s.dynatemp_range:
            return logits / s.temperature
        low, high = max(0.0, s.temperature - s.dynatemp_range), s.temperature + s.dynatemp_range
        n = int((logits > -np.inf).sum())
        if n == 1:
            return logits
        scaled: Row = logits / (low + (high - low) * (entropy(logits) / math.log(n)) ** s.dynatemp_exponent)
        return scaled

    def _adaptive(self, logits: Row) -> Row:
        s = self.sampling
        if not s.adaptive_entropy:
            return logits
        current = entropy(logits)
        previous = current if self.mean_entropy is None else self.mean_entropy
        self.mean_entropy = s.adaptive_decay * previous + (1 - s.adaptive_decay) * current
        return logits * max(1.0, self.mean_entropy / s.adaptive_entropy)

    def _mirostat(self, logits: Row) -> Row:
        if self.sampling.mirostat == 1:
            k = self._zipf_k(np.sort(softmax(logits))[::-1][:100])
            self._record_margin(np.array([k - round(k)]) / max(1.0, k))
            return self._first(logits, -logits, max(1, math.floor(k)))
        if self.sampling.mirostat == 2:
            return self._keep(logits, log_softmax(logits), -self._target_surprise() * math.log(2))
        return logits

    def _zipf_k(self, p: Row) -> float:
        """Algorithm 1 of arXiv 2007.14966: the exponent by least squares over 100 tokens, then k."""
        t = [math.log((i + 1) / i) for i in range(1, len(p))]
        b = [math.log(p[i - 1] / p[i]) for i in range(1, len(p))]
        s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
        eps = s - 1
        return float((eps * 2 ** self._target_surprise() / (1 - self.vocab.size**-eps)) ** (1 / s))

    def _target_surprise(self) -> float:
        return 2 * self.sampling.mirostat_tau if self.mu is None else self.mu

    def _keep(self, logits: Row, values: Row, bound: float) -> Row:
        """Remove the tokens with smaller values; at least ``min_keep`` stay."""
        self._record_margin(values[np.isfinite(values)] - bound)
        mask = values >= bound
        if mask.sum() < self.sampling.min_keep:
            return self._first(logits, -logits, self.sampling.min_keep)
        return np.where(mask, logits, -np.inf)

    def _until(self, logits: Row, key: Row, mass: float) -> Row:
        """Keep the tokens with the smallest keys until their sum of probabilities reaches ``mass``."""
        reached = np.cumsum(softmax(logits)[np.argsort(key, kind="stable")])
        self._record_margin(reached - mass)
        n = int(np.count_nonzero(reached < mass)) + 1
        return self._first(logits, key, max(n, self.sampling.min_keep))

    def _first(self, logits: Row, key: Row, n: int) -> Row:
        """Keep the ``n`` tokens with the smallest keys; ties go to the lower id."""
        ids = np.argsort(key, kind="stable")
        if n < len(ids) and key[ids[n - 1]] < key[ids[n]] < math.inf:
            self._record_margin(key[ids[n : n + 1]] - key[ids[n - 1]])
        return np.where(np.isin(np.arange(len(logits)), ids[:n]), logits, -np.inf)

    def _record_margin(self, distances: Row) -> None:
        finite = np.abs(distances[np.isfinite(distances)])
        self.margin = min(self.margin, float(finite.min(initial=math.inf)))


def softmax(logits: NDArray[np.floating]) -> Row:
    """Probabilities, float64 [V]."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    shares: Row = weights / weights.sum()
    return shares


def log_softmax(logits: Row) -> Row:
    """Natural logarithms of the probabilities, float64 [V]."""
    logp: Row = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    return logp


def entropy(logits: Row) -> float:
    """Entropy in nats."""
    p = softmax(logits)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def uniform_numbers(seed: int, stream: int) -> Iterator[float]:
    """The top 53 bits of SplitMix64 (Steele, Lea, Flood 2014), with a state from seed and stream."""

    def split_mix64(state: int) -> Iterator[int]:
        while True:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = state
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            yield z ^ (z >> 31)

    def nth(n: int) -> int:
        """Output ``n`` of the generator with seed 0, computed directly."""
        return next(split_mix64((n - 1) * 0x9E3779B97F4A7C15 % 2**64))

    start = nth(nth(seed) ^ stream)
    for number in split_mix64(start * 0x9E3779B97F4A7C15 % 2**64):
        yield (number >> 11) / 2**53


def drawn(probs: Row, number: float) -> int:
    """The token at which the cumulative probability exceeds the number."""
    return int(np.searchsorted(np.cumsum(probs), number, side="right"))


def likeliest(probs: Row, n: int) -> list[tuple[int, float]]:
    """The ``n`` likeliest allowed tokens, and their log probabilities."""
    ranked: Sequence[int] = np.argsort(-probs, kind="stable")[:n].tolist()
    return [(token, math.log(probs[token])) for token in ranked if probs[token] > 0]

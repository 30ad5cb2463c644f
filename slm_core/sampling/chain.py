"""The sampler chain: penalties, then cuts from the most likely tokens, then the draw."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot, SamplingError
from slm_core.sampling.options import Sampling
from slm_core.snapshot import is_count

PENALTY_WINDOW = 64
_MASK64 = 2**64 - 1


class SamplerChain:
    """Logits in, token out; deterministic for a seed. See ``protocols.Sampler``.

    Args:
        sampling: the options.
        stream: chooses one of many independent streams of the same seed, such as one an answer.
    """

    def __init__(self, sampling: Sampling, *, stream: int = 0) -> None:
        self.sampling = sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._first_state = split_mix(split_mix(seed & _MASK64) ^ (stream & _MASK64))
        self._n_draws = 0
        self._history: deque[int] = deque(maxlen=PENALTY_WINDOW)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits, float32 [V]; the row is not changed."""
        best = float(logits.max())
        if not np.isfinite(best):
            raise SamplingError(f"no token can be chosen: the largest logit is {best}")
        row = self._penalized(logits)
        if self.sampling.temperature == 0:
            return int(row.argmax())
        ids, kept = self._most_likely(row)
        weights = np.exp((kept - kept[0]) / self.sampling.temperature)
        edges = np.cumsum(weights)
        return int(ids[np.searchsorted(edges, self._uniform() * edges[-1], side="right").clip(max=len(ids) - 1)])

    def accept(self, token: int) -> None:
        """Note a token, for the penalties."""
        self._history.append(token)

    def set_history(self, tokens: Sequence[int]) -> None:
        """Replace what penalties see; the stream of random numbers goes on."""
        self._history = deque(tokens[-PENALTY_WINDOW:], maxlen=PENALTY_WINDOW)

    def reset(self) -> None:
        """Back to the state at creation."""
        self._n_draws = 0
        self._history.clear()

    def clone(self) -> Self:
        """An independent copy that continues the same stream."""
        twin = type(self)(self.sampling)
        twin.set_state(self.state())
        return twin

    def state(self) -> bytes:
        """The exact state, as JSON."""
        return json.dumps([self._first_state, self._n_draws, list(self._history)]).encode()

    def set_state(self, state: bytes) -> None:
        """Continue where ``state`` was taken."""
        try:
            first_state, n_draws, history = json.loads(state)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidSnapshot("not the state of a sampler chain") from error
        if not isinstance(history, list) or not all(is_count(n) for n in (first_state, n_draws, *history)):
            raise InvalidSnapshot("not the state of a sampler chain")
        self._first_state, self._n_draws = first_state & _MASK64, n_draws
        self.set_history(history)

    def _penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        penalty = self.sampling.repeat_penalty
        if penalty == 1 or not self._history:
            return logits
        row = logits.copy()
        seen = np.unique(np.array(self._history))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        return row

    def _most_likely(self, row: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Ids and logits of the tokens that top_k, top_p and min_p keep, most likely first; at least one."""
        top_k, top_p, min_p = self.sampling.top_k, self.sampling.top_p, self.sampling.min_p
        ids = np.argpartition(row, -top_k)[-top_k:] if 0 < top_k < len(row) else np.arange(len(row))
        ids = ids[np.lexsort((ids, -row[ids]))]
        kept = row[ids].astype(np.float64)
        share = np.exp(kept - kept[0])
        if top_p < 1:
            before = np.cumsum(share) - share
            share = share[: max(1, np.count_nonzero(before < top_p * share.sum()))]
        n = max(1, np.count_nonzero(share >= min_p))
        return ids[:n], kept[:n]

    def _uniform(self) -> float:
        """The next number in [0, 1) of the stream."""
        self._n_draws += 1
        return (split_mix(self._first_state + self._n_draws) >> 11) / 2**53


def split_mix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): a 64-bit integer to one that looks random.

    As a function of (seed, counter) it makes the state of a stream two integers, the same on every machine.
    """
    z = (value * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)

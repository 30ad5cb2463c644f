"""The sampler chain: the steps of the options, then the draw."""

from __future__ import annotations

import json
import math
import secrets
import weakref
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import check_kind
from slm_core.container import is_count
from slm_core.errors import InvalidSnapshot, SamplingError
from slm_core.numerics import as_finite
from slm_core.protocols import Vocab
from slm_core.sampling.candidates import Candidates, best_of, shortlist, softmax, take
from slm_core.sampling.options import Sampling
from slm_core.sampling.order import ORDER
from slm_core.sampling.state import History, StepState
from slm_core.sampling.steps import MOST_RANKED, Known, breaker_tokens, build_steps, history_window
from slm_core.sampling.stream import MASK64, UniformStream
from slm_core.sampling.temperatures import MU, next_mu

_breakers: weakref.WeakKeyDictionary[Vocab, dict[tuple[str | int, ...], frozenset[int]]] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=4)
def _all_ids(n_vocab: int) -> NDArray[np.int64]:
    """All token ids, int64 [V], read-only: one array for all chains, as it takes 1 MB for a large vocabulary."""
    ids = np.arange(n_vocab)
    ids.flags.writeable = False
    return ids


class SamplerChain:
    """Logits in, token out; deterministic for a seed. See ``protocols.Sampler``.

    Args:
        sampling: the options.
        stream: the number of one of many independent streams of the same seed, for example one per answer.
        eog_ids: the EOG tokens; ``min_tokens`` and ``eog_bias`` need them.
        known: instead of ``eog_ids``, all known properties of the vocabulary.

    Raises:
        InvalidOption: an option needs the vocabulary; use ``for_vocab``.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        stream: int = 0,
        eog_ids: Collection[int] | None = None,
        known: Known | None = None,
    ) -> None:
        self.sampling = sampling
        self._known = known if known is not None else Known(eog_ids)
        self._steps = build_steps(sampling, self._known)
        self._stream = UniformStream(secrets.randbits(63) if sampling.seed is None else sampling.seed, stream)
        self._n_needed = sampling.top_k if self._steps and self._steps[0][0] == "top_k" else 0
        self._is_greedy = sampling.temperature == 0 and [name for name, _ in self._steps] == ["temperature"]
        self._history = History(history_window(sampling))
        self._n_said = 0
        self._memory: dict[str, float] = {}
        self._keeps_last = sampling.logprobs is not None or any(
            name not in ORDER or name in ("mirostat", "adaptive") for name in sampling.steps
        )
        self._last: tuple[NDArray[np.int64], NDArray[np.float64], dict[str, float]] | None = None

    def __repr__(self) -> str:
        return f"SamplerChain({self.sampling!r})"

    @classmethod
    def for_vocab(cls, sampling: Sampling, vocab: Vocab, *, stream: int = 0) -> Self:
        """A chain with the properties of a vocabulary that its options need.

        Raises:
            InvalidOption: an option has a token outside the vocabulary, or a breaker that no token contains; or
                ``sampling`` is not a ``Sampling``.
        """
        check_kind("sampling", sampling, Sampling)
        return cls(sampling, stream=stream, known=known_of(sampling, vocab))

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits, float32 [V]; the row is not changed.

        Raises:
            SamplingError: no token can be chosen.
        """
        if self._is_greedy and not self._keeps_last:
            return self._likeliest(logits)
        return self._drawn(*self.distribution(logits))

    @property
    def n_top(self) -> int | None:
        """The number k if the chain reads only the k largest logits; None if it reads (nearly) all."""
        if self._is_greedy:
            return 1
        return self._n_needed if 0 < self._n_needed <= MOST_RANKED else None

    def sample_top(self, tokens: NDArray[np.int32], logits: NDArray[np.float32], n_vocab: int) -> int:
        """Choose the same token as ``sample`` of the whole row, from its ``n_top`` largest logits or more.

        Args:
            tokens: int32 [k], by descending logits; ties: lower id first.
            logits: float32 [k], the logits of these tokens; the whole row if V is smaller than k.
            n_vocab: the length of the whole row, V.

        Raises:
            SamplingError: no token can be chosen.
        """
        if not math.isfinite(logits[0]):
            raise SamplingError(f"no token can be chosen: the largest logit is {logits[0]}")
        ascending = tokens.argsort()
        if logits[-1] == -np.inf:
            ascending = ascending[logits[ascending] > -np.inf]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            candidates = tokens[ascending].astype(np.int64), logits[ascending].astype(np.float64)
            return self._drawn(*self._distribution(candidates, n_vocab))

    def distribution(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The distribution that ``sample`` would draw from; draws nothing.

        The next accepted token counts as drawn from it, so mirostat and adaptive temperature learn from that token.

        Args:
            logits: one row, float32 [V].

        Returns:
            The n possible tokens, int64 [n], ascending, and their probabilities, float64 [n], with the sum 1.

        Raises:
            SamplingError: no token can be chosen.
        """
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return self._distribution(self._candidates(logits), len(logits))

    @property
    def drawn_from(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """The last distribution, until a token is accepted; kept for ``Sampling.logprobs``."""
        return None if self._last is None else self._last[:2]

    def uniform(self) -> float:
        """Take the next random number in [0, 1) of the stream; ``sample`` takes one per token."""
        return self._stream.take()

    def accept(self, token: int) -> None:
        """Accept a token, for penalties and steps that learn."""
        self._history.append(token)
        self._n_said += 1
        if self._last is not None:
            self._learn(token, *self._last)
            self._last = None

    def set_history(self, tokens: Sequence[int] | NDArray[np.int32], *, n_said: int = 0) -> None:
        """Replace the history of penalties. The random stream and the memory of steps continue.

        Args:
            tokens: the history.
            n_said: the number of last tokens that belong to the current answer; 0 at its beginning.
        """
        self._history.replace(tokens)
        self._n_said = n_said
        self._last = None

    def reset(self) -> None:
        """Reset to the initial state."""
        self._stream.n_draws = 0
        self._memory = {}
        self.set_history(())

    def clone(self) -> SamplerChain:
        """An independent copy that continues the same stream."""
        twin = SamplerChain(self.sampling, known=self._known)
        twin._stream.start, twin._stream.n_draws = self._stream.start, self._stream.n_draws
        twin._history, twin._n_said = self._history.copy(), self._n_said
        twin._memory, twin._last = dict(self._memory), self._last
        return twin

    def state(self) -> bytes:
        """The exact state between ``accept`` and the next row: a line of JSON, then the history, int32."""
        head = [self._stream.start, self._stream.n_draws, self._n_said, self._memory]
        return json.dumps(head).encode() + b"\n" + self._history.tokens.astype("<i4", copy=False).tobytes()

    def set_state(self, state: bytes) -> None:
        """Restore the result of ``state``."""
        head, _, tail = state.partition(b"\n")
        try:
            start, n_draws, n_said, memory = json.loads(head)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidSnapshot("not the state of a sampler chain") from error
        counts = all(is_count(n) and n <= MASK64 for n in (start, n_draws, n_said))
        if not counts or not _is_memory(memory) or len(tail) % 4:
            raise InvalidSnapshot("not the state of a sampler chain")
        history = np.frombuffer(tail, "<i4")
        if len(history) and history.min() < 0:
            raise InvalidSnapshot("the history in the state of a sampler chain contains a value that is not a token")
        self.set_history(history)
        self._stream.start, self._stream.n_draws = start, n_draws
        self._n_said, self._memory = n_said, memory

    def _distribution(self, candidates: Candidates, n_vocab: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        state = StepState(self._history.tokens, self._n_said, n_vocab, self._memory, self._stream.aside())
        ids, remaining = self._run_steps(candidates, state)
        probs = softmax(remaining).astype(np.float64, copy=False)
        if math.isnan(probs[0]):  # all are NaN if a logit is NaN, or if the largest is infinite
            raise SamplingError(f"no token can be chosen: after the steps the largest logit is {remaining.max()}")
        if self._keeps_last:
            self._last = (ids, probs, state.learned)
        return ids, probs

    def _likeliest(self, logits: NDArray[np.float32]) -> int:
        """The greedy choice without running the steps, which would take three times as long; ties: the first."""
        token = int(logits.argmax())
        if not math.isfinite(logits[token]):
            raise SamplingError(f"no token can be chosen: the largest logit is {float(logits[token])}")
        self._stream.take()
        return token

    def _drawn(self, ids: NDArray[np.int64], probs: NDArray[np.float64]) -> int:
        number = self._stream.take()
        return int(ids[_place(probs, number)]) if len(ids) > 1 else int(ids[0])

    def _candidates(self, logits: NDArray[np.float32]) -> Candidates:
        """All tokens with a finite logit; or a subset that contains every token that the first step keeps."""
        shortlisted = shortlist(logits, self._n_needed) if self._n_needed else None
        if shortlisted is not None:
            return shortlisted[0], shortlisted[1].astype(np.float64)
        best = float(best_of(logits))
        if not math.isfinite(best):
            raise SamplingError(f"no token can be chosen: the largest logit is {best}")
        all_ids = _all_ids(len(logits))
        if logits.min() == -np.inf:
            return take(all_ids, logits, (logits > -np.inf).nonzero()[0])
        return all_ids, logits

    def _run_steps(self, candidates: Candidates, state: StepState) -> Candidates:
        ids, logits = candidates
        for name, step in self._steps:
            ids, logits = step(ids, logits, state)
            if len(ids) == 0:
                raise SamplingError(f"no token can be chosen: step {name!r} left none")
        return ids, logits

    def _learn(self, token: int, ids: NDArray[np.int64], probs: NDArray[np.float64], learned: dict[str, float]) -> None:
        self._memory = {**self._memory, **learned}
        index = int(np.searchsorted(ids, token))
        if not self.sampling.mirostat or index == len(ids) or ids[index] != token or probs[index] == 0:
            return
        tau, eta = self.sampling.mirostat_tau, self.sampling.mirostat_eta
        surprise = -float(np.log2(probs[index]))
        self._memory[MU] = next_mu(self._memory.get(MU, 2 * tau), surprise, tau=tau, eta=eta)


def known_of(sampling: Sampling, vocab: Vocab) -> Known:
    """The properties of a vocabulary that the options need.

    Raises:
        InvalidOption: a breaker that no token contains.
    """
    breaker_ids = _breaker_ids(vocab, sampling.dry_breakers) if sampling.dry_multiplier else None
    return Known(vocab.eog_ids, breaker_ids, vocab.size)


def _place(probs: NDArray[np.float64], number: float) -> int:
    """The index at which the cumulative probability exceeds a number in [0, 1)."""
    # The product of a number below 1 and a sum is below the sum, also after rounding.
    n_blocks = 1 if len(probs) < 8192 else len(probs) // 512
    if n_blocks == 1:
        edges = np.add.accumulate(probs)
        return int(edges.searchsorted(number * edges[-1], side="right"))
    # A cumulative sum over the whole vocabulary would dominate the time; sums over blocks take almost none.
    starts = np.arange(n_blocks) * 512
    blocks = np.add.reduceat(probs, starts)
    edges = np.cumsum(blocks)
    block = int(np.searchsorted(edges, number * edges[-1], side="right"))
    within = probs[starts[block] :] if block == n_blocks - 1 else probs[starts[block] : starts[block] + 512]
    inside = np.cumsum(within) + (edges[block] - blocks[block])
    # Sums within a block and sums over blocks are rounded differently.
    return int(starts[block]) + min(int(np.searchsorted(inside, number * edges[-1], side="right")), len(within) - 1)


def _is_memory(memory: object) -> bool:
    return isinstance(memory, dict) and all(as_finite(value) is not None for value in memory.values())


def _breaker_ids(vocab: Vocab, breakers: tuple[str | int, ...]) -> frozenset[int]:
    """The tokens at which repetitions break; computed once per vocabulary."""
    cached = _breakers.setdefault(vocab, {})
    if breakers not in cached:
        data = [vocab.token_bytes(token, special=True) for token in range(vocab.size)]
        cached[breakers] = breaker_tokens(breakers, data)
    return cached[breakers]

"""Contrastive decoding: choose tokens that are likelier in a large model than in a small one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import check_methods, refused
from slm_core.chat.answers import SAMPLER_METHODS, SAMPLERS
from slm_core.chat.session import Session
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation.speculation import same_tokens
from slm_core.numerics import checked_log_sum_exp
from slm_core.protocols import Sampler, Vocab


class ContrastiveSampler:
    """A sampler whose rows are the difference of two models (Li et al., arXiv 2210.15097); see ``protocols.Sampler``.

    A token's score is its log probability in the expert (the answering model) minus its log probability in the amateur.
    Tokens whose probability in the expert is below ``plausibility`` times the largest one are removed. The amateur's
    session follows the expert's history, and decodes each token after it.

    Args:
        amateur: a session of a smaller model; only the sampler may use it from now on.
        inner: draws from the scores.
        vocab: the expert's vocabulary; the amateur's vocabulary must have the same tokens.
        plausibility: above 0, up to 1; the paper uses 0.1.

    Raises:
        InvalidOption: ``plausibility`` is out of its range, the vocabularies differ, or a value of the wrong type.
    """

    def __init__(self, amateur: Session, inner: Sampler, vocab: Vocab, *, plausibility: float = 0.1) -> None:
        if isinstance(plausibility, bool) or not isinstance(plausibility, int | float) or not 0 < plausibility <= 1:
            raise InvalidOption(f"plausibility={plausibility!r} (accepted: a number above 0, up to 1)")
        if not isinstance(amateur, Session):
            raise refused("amateur", amateur, "a session of the smaller model")
        check_methods("inner", inner, SAMPLER_METHODS, SAMPLERS)
        if vocab.size != amateur.vocab.size or not same_tokens(vocab, amateur.vocab):
            raise InvalidOption(
                f"the amateur has another vocabulary, of {amateur.vocab.size} tokens (accepted: the expert's"
                f" {vocab.size} tokens)"
            )
        self._amateur = amateur
        self._inner = inner
        self._vocab = vocab
        self._plausibility = plausibility

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of the expert's logits, float32 [V]; the row is not changed."""
        return self._inner.sample(self.scores(logits))

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scores to sample from, float32 [V]: the difference of log probabilities; -inf for removed tokens."""
        amateur_row = self._amateur.next_logits()
        if amateur_row is None:
            raise SessionError("the amateur's session gave no logits")
        scores = (logits - checked_log_sum_exp(logits)) - (amateur_row - checked_log_sum_exp(amateur_row))
        scores[logits < logits.max() + math.log(self._plausibility)] = -np.inf
        return np.asarray(scores, np.float32)

    def accept(self, token: int) -> None:
        """Accept a token, in the amateur's session, too."""
        self._inner.accept(token)
        self._amateur.append_tokens([token])

    def set_history(self, tokens: Sequence[int]) -> None:
        """Replace the history of penalties and of the amateur's session."""
        self._inner.set_history(tokens)
        self._amateur.follow(tokens)

    def reset(self) -> None:
        """Reset to the initial state; the amateur's session does not change."""
        self._inner.reset()

    def clone(self) -> Self:
        """An independent copy, with a fork of the amateur's session."""
        return type(self)(self._amateur.fork(), self._inner.clone(), self._vocab, plausibility=self._plausibility)

    def state(self) -> bytes:
        """The state of the inner sampler; ``set_history`` restores the amateur."""
        return self._inner.state()

    def set_state(self, state: bytes) -> None:
        """Restore the result of ``state``."""
        self._inner.set_state(state)

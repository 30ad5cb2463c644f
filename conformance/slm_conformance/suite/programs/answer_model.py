"""A model of an answer in plain Python, token by token: when it ends, and the text shown so far."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from dataclasses import dataclass, field

from slm_core.generation import FinishReason, StoppingAction
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling

_CRITERIA = {StoppingAction.FINISH: FinishReason.STOP, StoppingAction.STOP: FinishReason.CANCELLED}


class CriterionError(Exception):
    """The exception that stopping criteria of programs raise."""


@dataclass(frozen=True, slots=True)
class Every:
    """A stopping criterion that returns an action at every n-th token of the answer.

    Attributes:
        n_tokens: n.
        action: the action; None raises ``CriterionError``.
    """

    n_tokens: int
    action: StoppingAction | None

    def __call__(self, event: object, draft: object) -> StoppingAction:
        """See ``generation.StoppingCriterion``."""
        if len(draft.tokens) % self.n_tokens:  # type: ignore[attr-defined]
            return StoppingAction.NEXT
        if self.action is None:
            raise CriterionError
        return self.action

    def spelled(self) -> str:
        """The criterion as Python."""
        return f"Every({self.n_tokens}, {'None' if self.action is None else f'StoppingAction.{self.action.name}'})"


@dataclass(slots=True)
class AnswerModel:
    """An answer that is running, or has just ended.

    Attributes:
        sampling: its options.
        n_prompt: number of tokens before it.
        n_cached: number of tokens of the prompt that were already decoded.
        stops: its stop texts.
        special: whether control tokens become text.
        has_own_chain: whether it has its own sampler chain, which begins with number 0 of its stream.
        criterion: called after each token.
        tokens: its tokens.
        n_drawn: number of random numbers that its own chain has used.
        paused: whether it is paused.
        reason: why it ended; None if it has not ended.
    """

    sampling: Sampling
    n_prompt: int
    n_cached: int
    stops: tuple[str, ...] = ()
    special: bool = False
    has_own_chain: bool = True
    criterion: Every | None = None
    tokens: list[int] = field(default_factory=list)
    n_drawn: int = 0
    paused: bool = False
    reason: FinishReason | None = None

    @property
    def at_limit(self) -> bool:
        """Whether it has ``max_tokens`` tokens."""
        return self.sampling.max_tokens is not None and len(self.tokens) >= self.sampling.max_tokens

    def take(self, token: int, vocab: Vocab) -> bool:
        """Append a token; returns whether the stopping criterion raises then."""
        self.tokens.append(token)
        self.n_drawn += 1
        if token in vocab.eog_ids or self._first_stop(self._decoded(vocab)) is not None:
            self.reason = FinishReason.STOP
        action = StoppingAction.NEXT
        if self.criterion is not None and len(self.tokens) % self.criterion.n_tokens == 0:
            if self.criterion.action is None:
                return True
            action = self.criterion.action
        self.reason = self.reason or _CRITERIA.get(action) or (FinishReason.LENGTH if self.at_limit else None)
        self.paused = self.reason is None and action is StoppingAction.PAUSE
        return False

    def shown(self, vocab: Vocab) -> str:
        """The text shown so far."""
        text = self._decoded(vocab)
        stop = self._first_stop(text)
        if stop is not None:
            return text[:stop]
        if self.reason is not None:
            return text + self._rest(vocab)
        n_held_back = max((n for s in self.stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - n_held_back]

    def _first_stop(self, text: str) -> int | None:
        return min((text.find(stop) for stop in self.stops if stop in text), default=None)

    def _decoded(self, vocab: Vocab) -> str:
        """The complete characters so far."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self._data(vocab))

    def _rest(self, vocab: Vocab) -> str:
        """The text of the bytes of an incomplete character at the end."""
        return self._data(vocab).decode("utf-8", "replace")[len(self._decoded(vocab)) :]

    def _data(self, vocab: Vocab) -> bytes:
        text_tokens = (token for token in self.tokens if token not in vocab.eog_ids)
        return b"".join(vocab.token_bytes(token, special=self.special) for token in text_tokens)


def spelled(sampling: Sampling) -> str:
    """The options that differ from the defaults, as Python."""
    plain = Sampling()
    names = [name for name in Sampling.__dataclass_fields__ if getattr(sampling, name) != getattr(plain, name)]
    return f"Sampling({', '.join(f'{name}={getattr(sampling, name)!r}' for name in names)})"


def letter_bias(vocab: Vocab, letters: str, bias: float) -> dict[int, float]:
    """Logit biases that make a random model prefer some letters."""
    ids: Collection[int] = {vocab.encode(x, add_special=False, parse_special=False)[-1] for x in letters}
    return dict.fromkeys(sorted(ids), bias)

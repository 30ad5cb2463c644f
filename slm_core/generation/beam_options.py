"""The options of a beam search, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slm_core.argument_checks import refused
from slm_core.display import changed_fields, count, preview, signature
from slm_core.errors import InvalidOption
from slm_core.generation.events import FinishReason, Timings, Usage
from slm_core.sampling.checks import READERS

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, repr=False)
class Beams:
    """Options of a beam search; the search draws no random numbers.

    Attributes:
        width: hypotheses that are kept at each step.
        n_best: hypotheses that are returned, at most ``width``.
        length_penalty: a hypothesis of n tokens ranks by its log probability divided by n to this power: a value above
            0 favours long hypotheses, 0 is the sum, a value below 0 favours short hypotheses.
        early_stopping: when the search ends after ``width`` hypotheses are finished. True: at once. False: when the
            best live beam, at its present length, ranks no higher than the worst finished hypothesis. "never": when no
            live beam could rank higher at any length; with ``length_penalty=0`` this is the textbook search.
        n_groups: groups of ``width / n_groups`` beams. In each step the groups search one after the other, and avoid
            the tokens of earlier groups (diverse beam search: Vijayakumar et al., arXiv 1610.02424).
        diversity_penalty: subtracted from a token's log probability for each beam of earlier groups that chose it.
        max_tokens: the longest hypothesis, in tokens.
        min_tokens: tokens before a hypothesis may end with an end-of-generation token.
        stop: texts that end a hypothesis; its text ends before them.
        logit_bias: from token ids to values added to their log probabilities; -inf bans a token.
        force_words: texts that every hypothesis contains.

    Raises:
        InvalidOption: a value is out of range, or two values exclude each other.
    """

    width: int = 4
    n_best: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_groups: int = 1
    diversity_penalty: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    force_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "force_words"):
            object.__setattr__(self, name, READERS["stop"](name, getattr(self, name)))
        for name, least in (("width", 1), ("n_best", 1), ("n_groups", 1), ("max_tokens", 1), ("min_tokens", 0)):
            _check_integer(name, getattr(self, name), least)
        _check_finite("length_penalty", self.length_penalty)
        _check_finite("diversity_penalty", self.diversity_penalty)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidOption(f"early_stopping={self.early_stopping!r} (accepted: True, False, 'never')")
        if not isinstance(self.logit_bias, Mapping):
            raise refused("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _check_integer("a token of logit_bias", token, 0)
            if bias != -math.inf:
                _check_finite(f"logit_bias[{token}]", bias)
        self._check_together()

    def _check_together(self) -> None:
        if self.n_best > self.width:
            raise InvalidOption(f"n_best={self.n_best} (accepted: up to width, which is {self.width})")
        if self.width % self.n_groups:
            raise InvalidOption(f"n_groups={self.n_groups} does not divide width={self.width}")
        if (self.n_groups > 1) != (self.diversity_penalty > 0):
            raise InvalidOption(
                f"n_groups={self.n_groups} with diversity_penalty={self.diversity_penalty}: groups need a penalty"
                " above 0, and a penalty needs groups"
            )
        if self.force_words and self.n_groups > 1:
            raise InvalidOption("force_words and n_groups do not go together: the words would be in every group")
        if self.min_tokens > self.max_tokens:
            raise InvalidOption(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True, repr=False)
class Hypothesis:
    """One answer of a beam search.

    Attributes:
        text: the answer.
        tokens: its tokens, including the token that ended it.
        logprobs: the model's log probability of each token, without biases and penalties.
        score: its rank: log probabilities, biases and diversity penalties, divided by the length penalty.
        finish_reason: why it ended.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish_reason: FinishReason

    def __repr__(self) -> str:
        n_tokens = count(len(self.tokens), "token")
        return signature(self, preview(self.text), f"score {self.score:.4g}", self.finish_reason, n_tokens)


@dataclass(frozen=True, slots=True, repr=False)
class BeamAnswer:
    """The result of a beam search.

    Attributes:
        hypotheses: the ``n_best`` hypotheses of the highest rank, best first; fewer only if a constraint allows no
            more, or the search was cancelled.
        usage: tokens; completion tokens are the tokens of all returned hypotheses.
        timings: seconds; without a first token, because the search yields no events.
    """

    hypotheses: tuple[Hypothesis, ...]
    usage: Usage
    timings: Timings

    def __repr__(self) -> str:
        return signature(
            self, f"{len(self.hypotheses)} hypotheses", *(f"best {each!r}" for each in self.hypotheses[:1])
        )

    @property
    def best(self) -> Hypothesis:
        """The hypothesis of the highest rank."""
        return self.hypotheses[0]

    @property
    def text(self) -> str:
        """The text of the best hypothesis."""
        return self.best.text

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the returned hypotheses per second of the search; 0.0 if there are none."""
        return self.usage.completion_tokens / self.timings.decode_s if self.usage.completion_tokens else 0.0


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidOption(f"{name}={value!r} (accepted: an integer from {least} on)")


def _check_finite(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidOption(f"{name}={value!r} (accepted: a finite number)")

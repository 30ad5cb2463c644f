"""An oracle: asks questions about a chat without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, EnumType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import check_kind, checked_list
from slm_core.chat.schema import Schema
from slm_core.chat.session import Session
from slm_core.chat.stream import parsed
from slm_core.constraints import AfterThinking, Spec
from slm_core.display import changed_fields, preview, signature
from slm_core.errors import InvalidOption, OracleError
from slm_core.generation import Answer, FinishReason, StoppingCriterion
from slm_core.numerics import log_probability
from slm_core.protocols import Constraint
from slm_core.sampling import Sampling

if TYPE_CHECKING:
    from slm_core.chat.chat import Chat

_Value = TypeVar("_Value")
_Member = TypeVar("_Member", bound=Enum)
GREEDY = Sampling(temperature=0)
_OPTIONS = "a list of texts, or an Enum"


@dataclass(frozen=True, slots=True, repr=False)
class Choice(Generic[_Value]):
    """The result of ``Oracle.choose``.

    Attributes:
        value: the likeliest option.
        probabilities: the probability of each option, in the order of the options; the sum is 1.
    """

    value: _Value
    probabilities: tuple[float, ...]

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True, repr=False)
class Extraction(Generic[_Value]):
    """The result of ``Oracle.extract``.

    Attributes:
        value: the JSON value, or the object of the pydantic model or dataclass.
        text: the JSON text.
        answer: the answer with the JSON, its usage and timings.
    """

    value: _Value
    text: str
    answer: Answer

    def __repr__(self) -> str:
        return signature(self, preview(self.text), f"read as {type(self.value).__name__}")


class Oracle:
    """Asks a chat's model about the chat so far.

    No call changes the chat: messages, tokens, lengths and next logits stay the same after success, an error, a raising
    callback and a cancelled answer. Answers are greedy by default.

    Args:
        chat: the chat to ask about.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def __repr__(self) -> str:
        return f"<Oracle of {self._chat!r}>"

    def ask(
        self,
        question: str,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        constraint: Constraint | Spec | None = None,
    ) -> Answer:
        """The answer to a question that is asked as the chat's next user message; ``constraint`` restricts it.

        ``max_tokens``, ``temperature``, ``top_p``, ``seed`` and ``stop`` replace these options of ``sampling``.
        """
        check_kind("sampling", sampling, Sampling)
        options = sampling.override(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        return self._ask(question, options, stopping_criteria, constraint, thinking=self._chat.options.thinking)

    def think(
        self,
        question: str,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        constraint: Constraint | Spec | None = None,
    ) -> Answer:
        """Like ``ask``, with reasoning turned on. ``Answer.reasoning`` has it; the constraint applies to it, too.

        Raises:
            TemplateError: the model's chat format cannot turn reasoning on.
        """
        check_kind("sampling", sampling, Sampling)
        options = sampling.override(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        return self._ask(question, options, stopping_criteria, constraint, thinking=True)

    @overload
    def choose(self, question: str, options: type[_Member]) -> Choice[_Member]: ...
    @overload
    def choose(self, question: str, options: Sequence[_Value]) -> Choice[_Value]: ...
    def choose(self, question: str, options: Sequence[_Value] | type[Enum]) -> Choice[Any]:
        """The option that is the likeliest whole answer.

        The score of an option is the probability of its tokens, followed by the end of the answer.

        Args:
            question: asked as the chat's next user message.
            options: at least two strings (or values with different ``str``), or an Enum of them.

        Raises:
            InvalidOption: not a list, fewer than two options, an empty option, or two options with the same text.
        """
        values, texts = _options(options)
        with self._chat.scratch_branch(question, thinking=self._chat.options.thinking) as session:
            scores = np.array(_score(session, texts))
        likelihoods = np.exp(scores - scores.max())
        probabilities = likelihoods / likelihoods.sum()
        return Choice(values[int(scores.argmax())], tuple(probabilities.tolist()))

    @overload
    def extract(
        self, schema: type[_Value], question: str | None = None, *, sampling: Sampling = GREEDY
    ) -> Extraction[_Value]: ...
    @overload
    def extract(
        self, schema: object, question: str | None = None, *, sampling: Sampling = GREEDY
    ) -> Extraction[Any]: ...
    def extract(self, schema: object, question: str | None = None, *, sampling: Sampling = GREEDY) -> Extraction[Any]:
        """Extract a JSON value from the chat; a constraint ensures that the answer matches the schema.

        If the prompt begins with reasoning, the model reasons first; the JSON follows.

        Args:
            schema: a pydantic model class, a dataclass, or a JSON schema as a mapping or text.
            question: requests the JSON; None for "Give me JSON with the keys ...".
            sampling: options of the answer; its stop texts are ignored.

        Raises:
            OracleError: the answer was incomplete at ``max_tokens`` or at the end of the context; or a validator of a
                pydantic model refused it.
            ConstraintError: the schema cannot be enforced.
        """
        check_kind("sampling", sampling, Sampling)
        target, thinking = Schema(schema), self._chat.options.thinking
        reasoning_end = self._chat.formatter.reasoning_end(thinking=thinking)
        spec: Spec = target.spec if reasoning_end is None else AfterThinking(target.spec, reasoning_end)
        question = question if question is not None else target.question()
        with self._chat.scratch_branch(question, thinking=thinking) as session:
            answer = session.generate(replace(sampling, stop=()), constraint=spec, special=True).run()
        if answer.finish_reason not in (FinishReason.CONSTRAINT, FinishReason.STOP):
            said = f"{len(answer.tokens)} tokens: {preview(answer.text)}"
            raise OracleError(f"the answer's JSON was not complete after {said}")
        text = answer.text if reasoning_end is None else answer.text.partition(reasoning_end)[2].strip()
        return Extraction(target.read(text), text, answer)

    def _ask(
        self,
        question: str,
        sampling: Sampling,
        stopping_criteria: Sequence[StoppingCriterion],
        constraint: Constraint | Spec | None,
        *,
        thinking: bool | None,
    ) -> Answer:
        formatter = self._chat.formatter
        limits = replace(sampling, stop=(*sampling.stop, *formatter.stops))
        with self._chat.scratch_branch(question, thinking=thinking) as session:
            raw = session.generate(
                limits, stopping_criteria=stopping_criteria, constraint=constraint, special=True
            ).run()
        return parsed(raw, formatter.stream_parser(thinking=thinking))


def _options(options: Sequence[_Value] | type[Enum]) -> tuple[list[_Value], list[str]]:
    values: list[_Value] = (
        list(options) if isinstance(options, EnumType) else checked_list("options", options, _OPTIONS)
    )
    texts = [str(value.value) if isinstance(value, Enum) else str(value) for value in values]
    if len(texts) < 2 or len(set(texts)) < len(texts) or not all(texts):
        raise InvalidOption(f"options {texts!r} (accepted: at least two texts, different and not empty)")
    return values, texts


def _score(session: Session, texts: Sequence[str]) -> list[float]:
    """The log-probability of each text as the whole answer."""
    length = session.n_tokens
    first = _row(session)
    scores = []
    for text in texts:
        score, row = 0.0, first
        for token in session.vocab.encode(text, add_special=False, parse_special=False):
            score += log_probability(row, token)
            session.append_tokens([token])
            row = _row(session)
        scores.append(score + _end_log_probability(row, session.vocab.eog_ids))
        session.truncate(length)
    return scores


def _row(session: Session) -> NDArray[np.float32]:
    row = session.next_logits()
    assert row is not None, "nobody cancels here"
    return row


def _end_log_probability(row: NDArray[np.float32], eog_ids: frozenset[int]) -> float:
    return float(np.logaddexp.reduce([log_probability(row, token) for token in sorted(eog_ids)])) if eog_ids else 0.0

"""A constraint that follows an answer, token by token, with llguidance's parser."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.constraints.deserialize import spec_from_dict
from slm_core.constraints.errors import constraint_error
from slm_core.constraints.grammar import GrammarBuilder
from slm_core.constraints.limits import Limits
from slm_core.constraints.specs import Spec
from slm_core.constraints.tokens import Bits, Prototype, TokenTable, token_table
from slm_core.container import is_count
from slm_core.errors import ConstraintError, InvalidSnapshot, InvalidToken, SamplingError
from slm_core.foreign import reported
from slm_core.protocols import Advance, FastForward, Forward, Stop, Vocab

if TYPE_CHECKING:
    from llguidance import LLMatcher

DEFAULT_LIMITS = Limits()
_MOST_MASKS = 64


def compile(spec: Spec, vocab: Vocab, *, limits: Limits = DEFAULT_LIMITS) -> GrammarConstraint:  # noqa: A001  (as in re.compile)
    """Compile a constraint for one answer. Compiled specs are cached: the same spec is cheap the next time.

    Args:
        spec: the specification of the constraint.
        vocab: the vocabulary of the model.
        limits: bounds on the work.

    Raises:
        ConstraintError: the spec is invalid, cannot be enforced, allows no answer, or exceeds the limits; with line and
            column if the spec has a text.
    """
    if not isinstance(spec, Spec):
        raise ConstraintError(f"constraint {spec!r} (accepted: a spec, such as JsonSchema(...))")
    table = token_table(vocab)
    builder = GrammarBuilder(vocab, table, limits)
    with reported(ConstraintError, "the constraint cannot be compiled"):
        grammar = builder.build(spec)
        key = f"{limits} {grammar}"
        if key not in table.prototypes:
            table.remember(key, Prototype(_matcher(grammar, table, limits), builder.free))
    table.prototypes.move_to_end(key)
    return GrammarConstraint(spec, vocab, table, table.prototypes[key])


def restore(vocab: Vocab, state: bytes, *, limits: Limits = DEFAULT_LIMITS) -> GrammarConstraint:
    """Restore a constraint from its ``state()``.

    Args:
        vocab: the same vocabulary, on any backend.
        state: the result of ``GrammarConstraint.state``.
        limits: bounds on the work.

    Raises:
        InvalidSnapshot: the bytes are not a state, or not a state for this vocabulary.
    """
    try:
        values = json.loads(state)
        tokens = values["tokens"]
        constraint = compile(spec_from_dict(values["spec"]), vocab, limits=limits)
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # ConstraintError is a ValueError
        raise InvalidSnapshot(f"the state of a constraint is malformed: {error}") from error
    if not isinstance(tokens, list) or not all(is_count(token) for token in tokens) or len(values) != 2:
        raise InvalidSnapshot("the state of a constraint is malformed")
    try:
        for token in tokens:
            constraint.advance(token)
    except (InvalidToken, ConstraintError) as error:
        raise InvalidSnapshot(f"the state of a constraint contradicts itself: {error}") from error
    return constraint


class GrammarConstraint:
    """A compiled spec over one vocabulary; made by ``compile``. See ``protocols.Constraint``.

    Attributes:
        spec: the spec.
    """

    def __init__(self, spec: Spec, vocab: Vocab, table: TokenTable, prototype: Prototype) -> None:
        self.spec = spec
        self._vocab = vocab
        self._table = table
        self._prototype = prototype
        self._matcher = prototype.matcher.deep_copy()
        self._free = prototype.free
        self._tokens: list[int] = []
        self._forced = self._forced_tokens()
        self._bits: Bits | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far can be a whole answer."""
        return self._matcher.is_accepting()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens consumed so far, without EOG."""
        return tuple(self._tokens)

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, if there is only one continuation."""
        return tuple(self._forced)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """The mask of tokens that may follow, bool [V].

        Raises:
            ConstraintError: computing the mask exceeded the limits, or no token of the vocabulary may follow.
        """
        return self._table.unpacked(self._allowed())

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of one row of logits, float32 [V], with -inf for tokens that may not follow."""
        if logits.shape != (self._table.size,):
            raise SamplingError(f"a row of logits of shape {logits.shape} (accepted: ({self._table.size},))")
        return np.minimum(logits, self._table.ceiling(self._allowed()))

    def advance(self, token: int) -> Advance:
        """Consume a token; an EOG token gives ``Stop``, and is allowed if the constraint is complete.

        Raises:
            InvalidToken: the token may not follow; nothing changed.
            ConstraintError: the computation exceeded the limits; nothing changed.
        """
        if token in self._table.eog:
            if not self.is_complete:
                raise InvalidToken(f"token {token} ends the answer, which is not complete")
            return Stop()
        announced = self._forced and (len(self._tokens) > 0)
        if not 0 <= token < self._table.size or (self._forced and token != self._forced[0]):
            raise InvalidToken(f"token {token} may not follow: the constraint does not allow it")
        if self._matcher.try_consume_tokens([token]) != 1:
            self._check_sound()
            raise InvalidToken(f"token {token} may not follow: the constraint does not allow it")
        return self._consumed(token, announced=bool(announced))

    def clone(self) -> Self:
        """An independent copy in the same state."""
        twin = object.__new__(type(self))
        twin.spec, twin._vocab, twin._table = self.spec, self._vocab, self._table
        twin._prototype, twin._matcher, twin._free = self._prototype, self._matcher.deep_copy(), self._free
        twin._tokens, twin._forced, twin._bits = list(self._tokens), deque(self._forced), self._bits
        return twin

    def state(self) -> bytes:
        """The spec and the consumed tokens as JSON text, for ``restore``."""
        return json.dumps({"spec": self.spec.to_dict(), "tokens": self._tokens}).encode()

    def _consumed(self, token: int, *, announced: bool) -> Advance:
        """Record a consumed token and compute the next state."""
        forced = deque(self._forced)
        if forced:
            forced.popleft()
        if not forced:
            announced = False
            try:
                forced = self._forced_tokens()
            except ConstraintError:
                self._rebuild()
                raise
        self._tokens.append(token)
        self._forced, self._bits = forced, None
        if self._free is not None:
            self._free = self._free.after(token, self._vocab.token_bytes(token))
        if self._matcher.is_stopped():
            return Stop()
        return FastForward(tuple(forced)) if forced and not announced else Forward()

    def _forced_tokens(self) -> deque[int]:
        """The tokens that must follow, checked against the grammar."""
        tokens = self._matcher.compute_ff_tokens()
        self._check_sound()
        return deque(tokens[: self._matcher.validate_tokens(tokens)] if tokens else ())

    def _allowed(self) -> Bits:
        if self._bits is None:
            self._bits = self._table.only(self._forced[0]) if self._forced else self._parsed()
        return self._bits

    def _parsed(self) -> Bits:
        cached = None if self._free is None else self._prototype.masks.get(self._free)
        if cached is not None:
            return cached
        allowed = self._table.allowed(self._matcher)
        self._check_sound()
        if not allowed.any() and not (self.is_complete and not self._table.eog.size):
            raise ConstraintError("no token of this vocabulary may follow")
        if self._free is not None and len(self._prototype.masks) < _MOST_MASKS:
            self._prototype.masks[self._free] = allowed
        return allowed

    def _check_sound(self) -> None:
        """Raise if the matcher has failed, which is permanent; a new matcher replaces it."""
        if self._matcher.is_error():
            message = self._matcher.get_error()
            self._rebuild()
            raise constraint_error(message)

    def _rebuild(self) -> None:
        self._matcher = self._prototype.matcher.deep_copy()
        self._matcher.try_consume_tokens(self._tokens)


def _matcher(grammar: str, table: TokenTable, limits: Limits) -> LLMatcher:
    """A matcher in the initial state; it allows at least one token."""
    from llguidance import LLMatcher

    matcher = LLMatcher(table.tokenizer, grammar, log_level=0, limits=limits.for_parser())
    if matcher.is_error():
        raise constraint_error(matcher.get_error())
    probe = matcher.deep_copy()
    allowed = table.allowed(probe)
    if probe.is_error():
        raise constraint_error(probe.get_error())
    if not allowed.any() and not probe.is_accepting():
        raise ConstraintError("the constraint allows no text, at least with this vocabulary")
    return matcher

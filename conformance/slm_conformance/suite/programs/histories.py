"""A history of tokens in the float64 reference: the part that a context has decoded, and the next logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slm_conformance.oracle.reference import Reference
from slm_conformance.suite.workshop import Rows
from slm_core.types import EditLevel


@dataclass(slots=True)
class History:
    """Tokens. The first ones are decoded in the reference, as they should be in the context.

    Attributes:
        reference: a reference in which the tokens are decoded that the context should have decoded.
        seq_id: the sequence in the reference.
        level: the context's edit level; below TRUNCATE, a removal drops all tokens.
        tokens: the history.
        row: the next logits, float64 [V], if they are available without decoding.
        was_cut: whether tokens were cut out before later tokens.
    """

    reference: Reference
    seq_id: int
    level: EditLevel
    tokens: list[int] = field(default_factory=list)
    row: Rows | None = None
    was_cut: bool = False

    @property
    def n_decoded(self) -> int:
        """The number of tokens that are decoded in the reference."""
        return self.reference.length(self.seq_id)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens without decoding them."""
        self.tokens, self.row = [*self.tokens, *tokens], None

    def shorten(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._forget_from(length)
        self.tokens, self.row = self.tokens[:length], None

    def follow(self, tokens: Sequence[int]) -> None:
        """Replace the tokens; the longest common prefix stays decoded."""
        pairs = zip(self.tokens, tokens, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens)))
        if common < len(self.tokens):
            self.shorten(common)
        if common < len(tokens):
            self.extend(tokens[common:])

    def remove(self, start: int, end: int, *, exact: bool) -> EditLevel:
        """Remove [start, end): by a cut at level CUT, unless later tokens are to be decoded again."""
        level = min(self.level, EditLevel.TRUNCATE) if exact else self.level
        if start == end:
            return level
        if level is EditLevel.CUT:
            if start < self.n_decoded:
                self.reference.cut(start, min(end, self.n_decoded), self.seq_id)
                self.was_cut = True
        else:
            self._forget_from(start)
        self.tokens, self.row = self.tokens[:start] + self.tokens[end:], None
        return level

    def next_row(self) -> Rows:
        """The next logits, float64 [V]; if they are not available, the last token is decoded again."""
        if self.row is None:
            if self.n_decoded == len(self.tokens):
                self._forget_from(len(self.tokens) - 1)
            self.row = self.reference.decode(self.tokens[self.n_decoded :], self.seq_id)[-1]
        return self.row

    def decode_to(self, length: int) -> None:
        """Decode or truncate the reference to this number of tokens, which the context has."""
        if length > self.n_decoded:
            self.reference.decode(self.tokens[self.n_decoded : length], self.seq_id)
        elif length < self.n_decoded:
            self.reference.truncate(length, self.seq_id)

    def copy(self, seq_id: int) -> History:
        """The same history in another sequence of the reference; the row is not copied."""
        self.reference.fork(self.seq_id, seq_id)
        return replace(self, seq_id=seq_id, tokens=list(self.tokens), row=None)

    def drop(self) -> None:
        """Drop the reference's sequence."""
        self.reference.drop(self.seq_id)

    def _forget_from(self, length: int) -> None:
        if length < self.n_decoded:
            self.reference.truncate(length if self.level >= EditLevel.TRUNCATE else 0, self.seq_id)

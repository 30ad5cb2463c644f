"""The history of a session: its inputs, extensions and edits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import checked_list, checked_tokens, refused
from slm_core.chat.guard import Guard, one_thread
from slm_core.chat.marks import Mark
from slm_core.chat.prompt import encode_segments
from slm_core.chat.records import check_records, context_inputs
from slm_core.chat.source import SessionSource
from slm_core.context.inputs import Held, block_boundary, token_ids
from slm_core.context_queue import ContextQueue
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import ContextFull, InvalidMark, InvalidSequence, SessionError
from slm_core.generation import Infill
from slm_core.interrupts import uninterrupted
from slm_core.numerics import common_prefix
from slm_core.protocols import Context, Vocab
from slm_core.types import EditLevel, Segment

_CONTENT = "a text, an Infill, or a list of segments; append_tokens takes tokens"


class SessionHistory(ABC):
    """The tokens and embedding rows of a session. They are decoded when they are needed.

    Attributes:
        context: the KV cache.
        vocab: the model's vocabulary.
        seq_id: the sequence of the session.
    """

    context: Context
    vocab: Vocab
    seq_id: int
    _source: SessionSource
    _queue: ContextQueue

    @property
    def _guard(self) -> Guard:
        return self._source.guard

    @property
    def closed(self) -> bool:
        """Whether the session is closed."""
        return self._source.closed

    @property
    def tokens(self) -> tuple[int, ...]:
        """The history, decoded or not; ``EMBEDDED`` for each embedding row."""
        return tuple(token_ids(self._source.inputs))

    @property
    def inputs(self) -> tuple[Held, ...]:
        """The history: token ids, and records of embedding rows and of tokens in bidirectional blocks."""
        return tuple(self._source.inputs)

    @property
    def text(self) -> str:
        """The history as text, including control tokens, without embedding rows."""
        return self.vocab.decode(self._source.history, special=True)

    @property
    def n_tokens(self) -> int:
        """Tokens and embedding rows of the history."""
        return self._source.n_tokens

    @property
    def adapters(self) -> Mapping[str, float]:
        """The adapters of the session, by name, with their scales."""
        return self.context.adapters(self.seq_id)

    @one_thread
    @uninterrupted
    def set_adapters(self, scales: Mapping[str, float]) -> None:
        """Continue with these adapters of the model, by name, in place of the present ones.

        The history is decoded again when it is needed: keys and values of other adapters are never used.

        Raises:
            UnsupportedInput: the context takes no adapters.
            InvalidOption: an unknown adapter, or a scale that is not a number from -1e6 to 1e6.
            ContextFull: the history shares storage with a fork, and there is no room to decode it again.
        """
        self._check_settled()
        with self._queue:
            before, n_held = self.adapters, self._source.decoded.n_held
            try:
                self.context.set_adapters(self.seq_id, scales)
            except InvalidSequence:  # the names are valid, and the sequence has tokens of other adapters
                free = self.context.n_free + self.context.n_exclusive(self.seq_id)
                if n_held > free:
                    raise ContextFull(n_held, free, seq_id=self.seq_id) from None
                self._source.decoded.clear()
                self.context.set_adapters(self.seq_id, scales)
        if self.adapters != before:
            self._edited(self._source.inputs)

    @property
    def n_pending(self) -> int:
        """Tokens and embedding rows of the history that are not decoded yet."""
        return self._source.n_pending

    # Growing.

    @one_thread
    def append(self, content: str | Infill | Sequence[Segment]) -> int:
        """Add text, which is never parsed for control tokens, a text with a gap, or segments.

        A text at the start of the history gets the model's BOS token. A text with a gap is the start.

        Returns:
            The number of tokens.

        Raises:
            ContextFull: no room; nothing changed.
            InvalidOption: content of another kind.
            SessionError: a text with a gap after other tokens.
            VocabError: a text with a gap, and the model was not trained to fill it.
        """
        if isinstance(content, Infill):
            if self.n_tokens:
                raise SessionError(f"a text with a gap begins a history, and this one has {self.n_tokens} tokens")
            ids = content.tokens(self.vocab)
        elif isinstance(content, str):
            ids = self.vocab.encode(content, add_special=not self.n_tokens, parse_special=False)
        else:
            segments = checked_list("content", content, _CONTENT)
            if not all(isinstance(segment, Segment) for segment in segments):
                raise refused("content", content, _CONTENT)
            ids = encode_segments(self.vocab, segments)
        self.append_tokens(ids)
        return len(ids)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens.

        Raises:
            InvalidOption: not a list of integers.
            ContextFull: no room; nothing changed.
        """
        self._append(checked_tokens("tokens", tokens))

    def append_rows(
        self,
        rows: NDArray[np.float32],
        *,
        blocks: Sequence[tuple[int, int]] = (),
        offsets: NDArray[np.integer] | None = None,
        bias: NDArray[np.float32] | None = None,
    ) -> None:
        """Add embedding rows in place of tokens, such as an encoded image; they are copied.

        Args:
            rows: float32 [n, E].
            blocks: ranges [start, end) of rows that are bidirectional blocks; at most ``n_batch`` rows each.
            offsets: M-RoPE offsets of the rows, integers [n, 3]; see ``Batch.add_embeddings``.
            bias: attention bias of the rows, float32 [n]; -inf masks a row; see ``Batch.add_embeddings``.

        Raises:
            InvalidEmbedding: no rows, or rows that are not finite float32 [n, E]; invalid offsets or bias.
            InvalidOption: invalid blocks, or a block that is longer than ``n_batch``.
            UnsupportedInput: the context takes no rows, no blocks, no offsets or no bias.
            ContextFull: no room; nothing changed.
        """
        self._source.check_open()
        self._append(context_inputs(self.context, EmbeddingRows(rows, blocks, offsets, bias=bias)))

    @one_thread
    @uninterrupted
    def follow(self, inputs: Sequence[Held]) -> None:
        """Make ``inputs`` the history: the longest common prefix is kept, later inputs are decoded when needed.

        Inputs are token ids and records, as in the property ``inputs``.

        Raises:
            ContextFull: no room; nothing changed.
            UnsupportedInput, InvalidEmbedding, InvalidOption: as in ``append_rows``.
        """
        self._check_settled()
        common = block_boundary(self._source.inputs, common_prefix(self._source.inputs, inputs))
        check_records(self.context, inputs[common:])
        kept = min(common, self._source.decoded.n_held)
        needed, free = len(inputs) - kept, self.context.n_free + self._source.decoded.n_held - kept
        if needed > free:
            raise ContextFull(needed, free, seq_id=self.seq_id)
        if common < self.n_tokens:
            self.truncate(common)
        if common < len(inputs):
            self._edited(list(inputs))

    # Going back.

    def mark(self) -> Mark:
        """A mark at the end of the history. It becomes stale when tokens before it are removed."""
        self._source.check_open()
        return self._source.marks.add(self.n_tokens)

    @one_thread
    def rollback(self, mark: Mark) -> None:
        """Remove all tokens after a mark. A mark can be used any number of times.

        Raises:
            InvalidMark: the mark is stale, or of another session.
        """
        self._source.check_open()
        self.truncate(self._source.marks.place(mark))

    @one_thread
    @uninterrupted
    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens and embedding rows.

        Raises:
            SessionError: the history has fewer, or ``length`` divides a bidirectional block.
        """
        self._check_settled()
        if not 0 <= length <= self.n_tokens:
            raise SessionError(f"cannot keep {length} tokens (accepted: 0 to {self.n_tokens})")
        self._source.check_boundary(length)
        if length == self.n_tokens:
            return
        if length < self._source.decoded.n_held:
            self._source.decoded.forget_from(length)
        self._edited(self._source.inputs[:length])
        self._source.marks.truncate(length)

    @one_thread
    def remove(self, start: Mark, end: Mark, *, exact: bool = False) -> EditLevel:
        """Remove the tokens between two marks.

        Args:
            start: the first removed token.
            end: the end, exclusive.
            exact: decode later tokens again; otherwise the tokens are cut, and later tokens keep their values.

        Returns:
            The edit: CUT, or TRUNCATE / REPLAY if later tokens are decoded again.

        Raises:
            InvalidMark: a mark is stale or of another session, or ``end`` is before ``start``.
        """
        self._source.check_open()
        first, last = self._source.marks.place(start), self._source.marks.place(end)
        if last < first:
            raise InvalidMark(f"the end mark (at {last}) is before the start mark (at {first})")
        return self.remove_span(first, last, exact=exact)

    @one_thread
    @uninterrupted
    def remove_span(self, start: int, end: int, *, exact: bool = False) -> EditLevel:
        """Like ``remove``, by positions: remove [start, end) of the history.

        Raises:
            SessionError: the range is outside the history, or divides a bidirectional block.
        """
        self._check_settled()
        if not 0 <= start <= end <= self.n_tokens:
            raise SessionError(f"cannot remove [{start}, {end}) (accepted: within 0 to {self.n_tokens})")
        for boundary in (start, end):
            self._source.check_boundary(boundary)
        level = self._source.take_out(start, end, exact=exact)
        if start < end:
            self._edited(self._source.inputs)
        return level

    # Steps that several calls share.

    def _check_settled(self) -> None:
        """Check that the session is open; remove tokens decoded ahead."""
        self._source.check_open()
        self._source.settle()

    @one_thread
    @uninterrupted
    def _append(self, inputs: Sequence[Held]) -> None:
        self._check_settled()
        needed = self.n_pending + len(inputs)
        if needed > self.context.n_free:
            raise ContextFull(needed, self.context.n_free, seq_id=self.seq_id)
        if inputs:
            self._edited([*self._source.inputs, *inputs])

    @abstractmethod
    def _edited(self, inputs: list[Held]) -> None:
        """Make ``inputs`` the history, which ends the current answer."""

"""The noun Batch: the input of one decode, as a structure of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.types import LogitsSelection, Pos


class Batch(Protocol):
    """Tokens to decode together, of one or more sequences; the capacity is fixed at creation.

    An embedding row may take the place of a token, and counts as a token.
    """

    @property
    def capacity(self) -> int:
        """The largest number of tokens in the batch."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, int32 [T], ``EMBEDDED`` for embedding rows; a read-only view."""
        ...

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """The embedding rows, float32 [n, E], one for each ``EMBEDDED`` token, in order; [0, 0] for none."""
        ...

    @property
    def offsets(self) -> NDArray[np.int32]:
        """M-RoPE offsets of each embedding row, int32 [n, 3], relative to a token at its position.

        [0, 3] if all rows have the default positions.
        """
        ...

    @property
    def bias(self) -> NDArray[np.float32]:
        """The attention bias of each embedding row, float32 [n]; [0] if all are 0."""
        ...

    @property
    def seq_ids(self) -> NDArray[np.int32]:
        """The sequence of each token, int32 [T]."""
        ...

    @property
    def positions(self) -> NDArray[np.int32]:
        """The position of each token in its sequence, int32 [T]."""
        ...

    @property
    def logits_mask(self) -> NDArray[np.bool_]:
        """The tokens that get a row of logits (of hidden states in ``embed``), bool [T]."""
        ...

    def add(self, token: int, pos: Pos, *, logits: bool = False) -> None:
        """Add one token.

        Raises:
            BatchFull: there is no room; the batch is unchanged.
            InvalidToken, InvalidPosition, InvalidSequence: a value that is invalid in every context (negative, or not
                int32).
        """
        ...

    def extend(
        self, tokens: Sequence[int] | NDArray[np.integer], start: Pos, *, logits: LogitsSelection = "none"
    ) -> None:
        """Add tokens at ``start`` and the next positions, all or none.

        Raises:
            BatchFull: there is no room for all tokens.
            InvalidToken, InvalidPosition, InvalidSequence: a value that is invalid in every context.
            InvalidOption: ``logits`` is not "none", "last" or "all".
        """
        ...

    def add_embeddings(
        self,
        rows: NDArray[np.float32],
        start: Pos,
        *,
        offsets: NDArray[np.integer] | None = None,
        bias: NDArray[np.float32] | None = None,
        logits: LogitsSelection = "none",
    ) -> None:
        """Add embedding rows, like ``extend`` adds tokens; they are copied.

        A row replaces the row of the model's embedding table for a token. Operations before the first block (learned
        positions, a norm) apply to embedding rows, too. A factor on embeddings depends on the model: gemma3's applies
        only to tokens, gemma's and granite's also to embedding rows.

        Args:
            rows: float32 [n, E].
            start: the position of the first row.
            offsets: integers [n, 3]: M-RoPE offsets in time, height and width, relative to the M-RoPE position that a
                token in place of the first row would have. Row (y, x) of an image has the offset (0, y, x). The next
                token gets the largest M-RoPE position before it, plus one. If a second call continues an image, its
                offsets are relative to that position, so they may be negative. None for the default positions, like
                tokens.
            bias: float32 [n]: the attention bias of each row. It is added to the scores of all other queries on the
                row's key, in every layer and head, after scale and soft cap and before the softmax. -inf masks the row.
                The score of the row's own query on its own key does not change, so every query has a key. None for 0.
            logits: see ``extend``.

        Raises:
            InvalidEmbedding: rows that are not finite float32 [n, E], or whose width differs from earlier rows of the
                batch; offsets that are not integers [n, 3], or beyond 2 ** 20; a bias that is not float32 [n], or that
                is NaN or above 1000.
            BatchFull, InvalidPosition, InvalidSequence, InvalidOption: as in ``extend``.
        """
        ...

    @property
    def ahead(self) -> NDArray[np.int32]:
        """For each token, the number of later tokens in its bidirectional block, int32 [T]; 0 outside of blocks."""
        ...

    def join_block(self, n: int) -> None:
        """Make the last ``n`` tokens or rows one bidirectional block.

        Each token attends to the whole block, and to all positions that it would attend to without the block.

        The tokens have to be in one sequence, without gaps in their positions, and not in a block yet.

        Raises:
            InvalidOption: n is below 1 or above the number of tokens, or the tokens do not meet these conditions.
        """
        ...

    def clear(self) -> None:
        """Remove all tokens; the capacity stays."""
        ...

    def __len__(self) -> int:
        """The number of tokens."""
        ...

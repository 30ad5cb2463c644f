"""The noun Batch: what one decode runs, as a structure of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.types import LogitsSelection, Pos


class Batch(Protocol):
    """Tokens to decode together, of one sequence or of many; the capacity is fixed at creation.

    An embedding row may stand in place of a token, and counts as one.
    """

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, int32 [T], ``EMBEDDED`` where a row stands in place of a token; a read-only view."""
        ...

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """The embedding rows, float32 [n, E], one for each token that is ``EMBEDDED``, in order; [0, 0] for none."""
        ...

    @property
    def offsets(self) -> NDArray[np.int32]:
        """Where each embedding row stands, int32 [n, 3], counted from where a token in its place would.

        [0, 3] where all rows stand as tokens would.
        """
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
            InvalidToken, InvalidPosition, InvalidSequence: a value that no context could take (negative, or not int32).
        """
        ...

    def extend(
        self, tokens: Sequence[int] | NDArray[np.integer], start: Pos, *, logits: LogitsSelection = "none"
    ) -> None:
        """Add a run of tokens at ``start`` and the positions after it; all of them or, on an error, none.

        Raises:
            BatchFull: there is no room for all.
            InvalidToken, InvalidPosition, InvalidSequence: a value that no context could take.
            InvalidOption: ``logits`` is not "none", "last" or "all".
        """
        ...

    def add_embeddings(
        self,
        rows: NDArray[np.float32],
        start: Pos,
        *,
        offsets: NDArray[np.integer] | None = None,
        logits: LogitsSelection = "none",
    ) -> None:
        """Add a run of embedding rows, as ``extend`` adds tokens; they are copied.

        A row stands for what the model's table of embeddings holds for a token. What the model does to that before
        its first block (learned positions, a norm) it does to rows, too; a factor on embeddings is the model's matter:
        gemma3's is on tokens alone, gemma's and granite's on rows as well.

        Args:
            rows: float32 [n, E].
            start: where the first one goes.
            offsets: integers [n, 3]: where rows stand in time, height and width, for models whose rotation has such
                sections (M-RoPE), counted from where a token in the first one's place would stand. Row (y, x) of an
                image is at (0, y, x). What follows stands one behind the furthest of all before it; an image that
                goes on in another run goes on from there, so that its offsets may be below 0. None: rows stand one
                behind the other, as tokens do.
            logits: as of ``extend``.

        Raises:
            InvalidEmbedding: not float32 [n, E], a number that is not finite, or a width other than that of rows
                that the batch holds; offsets that are no integers [n, 3], or beyond 2 ** 20.
            BatchFull, InvalidPosition, InvalidSequence, InvalidOption: as ``extend``.
        """
        ...

    @property
    def ahead(self) -> NDArray[np.int32]:
        """For each token, how many tokens after it are in its bidirectional block, int32 [T]; 0 outside of blocks."""
        ...

    def join_block(self, n: int) -> None:
        """Make the last ``n`` tokens or rows one bidirectional block.

        Each attends to the whole block, in addition to what it attends to without the block.

        They belong to one sequence, their positions have no gaps, and none is in a block yet.

        Raises:
            InvalidOption: n is below 1 or above the number of tokens added, or the tokens are no such run.
        """
        ...

    def clear(self) -> None:
        """Forget the tokens; the capacity stays."""
        ...

    def __len__(self) -> int:
        """Tokens added."""
        ...

"""The noun Batch: the tokens of one decode, as a structure of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.types import Pos, WantLogits


class Batch(Protocol):
    """Tokens to decode together, of one sequence or of many; the capacity is fixed at creation."""

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, int32 [T]; a read-only view of what was added."""
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
    def wants_logits(self) -> NDArray[np.bool_]:
        """Whether a logits row is wanted for each token, bool [T]."""
        ...

    def add(self, token: int, pos: Pos, *, logits: bool = False) -> None:
        """Add one token.

        Raises:
            BatchFull: there is no room; the batch is unchanged.
            InvalidToken, InvalidPosition, InvalidSequence: a value that no context could take (negative, or not int32).
        """
        ...

    def extend(self, tokens: Sequence[int] | NDArray[np.integer], start: Pos, *, logits: WantLogits = "none") -> None:
        """Add a run of tokens at ``start`` and the positions after it; all of them or, on an error, none.

        Raises:
            BatchFull: there is no room for all.
            InvalidToken, InvalidPosition, InvalidSequence: a value that no context could take.
            InvalidOption: ``logits`` is not "none", "last" or "all".
        """
        ...

    def clear(self) -> None:
        """Forget the tokens; the capacity stays."""
        ...

    def __len__(self) -> int:
        """Tokens added."""
        ...

"""Embedding rows in place of tokens: how they are checked, and what a sequence holds where one was decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidEmbedding
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, Pos

NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)
NO_ROWS.flags.writeable = False


class HeldRow(int):
    """The id ``EMBEDDED``, and the row that stands there in place of a token, float32 [E].

    Whatever moves ids about (forks, cuts, edits that are made again) moves rows along, and need not know of them.
    """

    row: NDArray[np.float32]

    def __new__(cls, row: NDArray[np.float32]) -> Self:
        """``EMBEDDED``, with ``row``."""
        made = super().__new__(cls, EMBEDDED)
        made.row = row
        return made


def held_inputs(tokens: NDArray[np.int32], rows: NDArray[np.float32]) -> list[int]:
    """The ids ``tokens`` [T] as a sequence holds them; those that are ``EMBEDDED`` with their rows [n, E], in order."""
    ids: list[int] = tokens.tolist()
    for place, row in zip(np.flatnonzero(tokens == EMBEDDED).tolist(), rows, strict=True):
        ids[place] = HeldRow(row)
    return ids


def rows_of(held: Iterable[int]) -> NDArray[np.float32]:
    """The rows among what a sequence holds, float32 [n, E]; [0, 0] where there are none."""
    rows = [one.row for one in held if isinstance(one, HeldRow)]
    return np.stack(rows) if rows else NO_ROWS


def add_held(batch: Batch, held: Sequence[int], start: Pos) -> None:
    """Add what a sequence holds to a batch that has room, to decode it again; no logits are asked for."""
    index = start.index
    for is_row, group in groupby(held, lambda one: isinstance(one, HeldRow)):
        run = list(group)
        place = Pos(start.seq_id, index)
        if is_row:
            batch.add_embeddings(rows_of(run), place)
        else:
            batch.extend(run, place)
        index += len(run)


def check_rows(rows: object, n_embd: int | None = None) -> None:
    """Refuse what are no embedding rows.

    Args:
        rows: what is given.
        n_embd: the width that they must have; None for any.

    Raises:
        InvalidEmbedding: not float32 [n, E], or a number that is infinite or none.
    """
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype != np.float32:
        what = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidEmbedding(f"embedding rows are {what} (accepted: a NumPy array, float32 [rows, E])")
    if n_embd is not None and len(rows) and rows.shape[1] != n_embd:
        raise InvalidEmbedding(
            f"embedding rows are {rows.shape[1]} wide (accepted: {n_embd}, as the model's embedding)"
        )
    if not np.isfinite(rows).all():
        first = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise InvalidEmbedding(f"embedding row {first} of {len(rows)} holds a number that is infinite or none")

"""What goes into a sequence besides token ids: embedding rows, and spans of tokens that see each other both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidEmbedding
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, Pos

NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)
NO_ROWS.flags.writeable = False
NO_AHEAD: NDArray[np.int32] = np.empty(0, np.int32)
NO_AHEAD.flags.writeable = False


class HeldInput(int):
    """An id that a sequence holds, and what else must be known of it to decode it again.

    Whatever moves ids about (forks, cuts, edits that are made again) moves this along, and need not know of it.

    Attributes:
        row: the embedding row in place of a token, float32 [E], where the id is ``EMBEDDED``; else None.
        ahead: how many tokens behind it were in its span when it was decoded.
    """

    row: NDArray[np.float32] | None
    ahead: int

    def __new__(cls, token: int, row: NDArray[np.float32] | None = None, ahead: int = 0) -> Self:
        """The id ``token``, with more."""
        made = super().__new__(cls, token)
        made.row, made.ahead = row, ahead
        return made


def row_of(held: int) -> NDArray[np.float32] | None:
    """The row [E] in place of a token, None where there is a token."""
    return held.row if isinstance(held, HeldInput) else None


def ahead_of(held: int) -> int:
    """How many tokens behind it were in its span."""
    return held.ahead if isinstance(held, HeldInput) else 0


def held_inputs(tokens: NDArray[np.int32], rows: NDArray[np.float32], ahead: NDArray[np.int32]) -> list[int]:
    """Inputs as a sequence holds them.

    Args:
        tokens: ids [T].
        rows: of those that are ``EMBEDDED`` [n, E].
        ahead: tokens behind each that are in its span [T]; [0] where there are no spans.
    """
    ids: list[int] = tokens.tolist()
    for place, row in zip(np.flatnonzero(tokens == EMBEDDED).tolist(), rows, strict=True):
        ids[place] = HeldInput(EMBEDDED, row)
    for place in np.flatnonzero(ahead).tolist():
        ids[place] = HeldInput(ids[place], row_of(ids[place]), int(ahead[place]))
    return ids


def rows_of(held: Iterable[int]) -> NDArray[np.float32]:
    """The rows among what a sequence holds, float32 [n, E]; [0, 0] where there are none."""
    rows = [row for one in held if (row := row_of(one)) is not None]
    return np.stack(rows) if rows else NO_ROWS


def all_ahead_of(held: Sequence[int]) -> NDArray[np.int32]:
    """How many tokens behind each were in its span, int32 [T]; [0] where there are no spans."""
    ahead = [ahead_of(one) for one in held]
    return np.array(ahead, np.int32) if any(ahead) else NO_AHEAD


def add_held(batch: Batch, held: Sequence[int], start: Pos) -> None:
    """Add what a sequence holds to a batch that has room, to decode it again; no logits are asked for."""
    index = start.index
    for piece in _pieces(held):
        for is_row, group in groupby(piece, lambda one: row_of(one) is not None):
            run, place = list(group), Pos(start.seq_id, index)
            if is_row:
                batch.add_embeddings(rows_of(run), place)
            else:
                batch.extend(run, place)
            index += len(run)
        if ahead_of(piece[0]):
            batch.join(len(piece))


def chunks_of(held: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """What a sequence holds, at most ``size`` at a time; no span, of which none is longer, is parted."""
    first = 0
    while first < len(held):
        end = min(first + size, len(held))
        while end > first and ahead_of(held[end - 1]):
            end -= 1
        yield held[first:end]
        first = end


def are_spans(ahead: NDArray[np.int32]) -> bool:
    """Whether numbers [T] say of each token of some spans how many are behind it."""
    inside = ahead[:-1] > 0
    return bool((ahead >= 0).all() and not ahead[-1:].any() and (ahead[1:] == ahead[:-1] - 1)[inside].all())


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
        raise InvalidEmbedding(f"embedding rows are {rows.shape[1]} wide (accepted: {n_embd}, as the model has)")
    if not np.isfinite(rows).all():
        first = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise InvalidEmbedding(f"embedding row {first} of {len(rows)} holds a number that is infinite or none")


def _pieces(held: Sequence[int]) -> Iterator[Sequence[int]]:
    """Spans, and what is between them."""
    begin = 0
    while begin < len(held):
        end = begin + ahead_of(held[begin]) + 1
        if end == begin + 1:
            end = next((i for i in range(end, len(held)) if ahead_of(held[i])), len(held))
        yield held[begin:end]
        begin = end

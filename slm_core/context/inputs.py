"""The inputs of a sequence besides token ids: embedding rows, their M-RoPE offsets, and bidirectional blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidEmbedding
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, Pos

NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)
NO_ROWS.flags.writeable = False
NO_AHEAD: NDArray[np.int32] = np.empty(0, np.int32)
NO_AHEAD.flags.writeable = False
NO_OFFSETS: NDArray[np.int32] = np.empty((0, 3), np.int32)
NO_OFFSETS.flags.writeable = False
MAX_OFFSET = 2**20
"""The largest M-RoPE offset. It is larger than any image, and bounds the sums of positions."""

Offset: TypeAlias = tuple[int, int, int]
"""An M-RoPE offset in time, height and width."""
_AS_A_TOKEN: Offset = (0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class HeldInput:
    """One input of a sequence that a token id does not describe completely.

    Attributes:
        token: the id; ``EMBEDDED`` for an embedding row.
        row: the embedding row in place of a token, float32 [E]; None for a token.
        ahead: the number of later tokens in its bidirectional block when it was decoded.
        offset: its M-RoPE position, relative to the default position: that of a token at this index.
    """

    token: int
    row: NDArray[np.float32] | None = None
    ahead: int = 0
    offset: Offset = _AS_A_TOKEN


Held: TypeAlias = int | HeldInput
"""One input of a sequence: a token id, or a record if the id alone does not describe it."""


def token_of(held: Held) -> int:
    """The token id; ``EMBEDDED`` for an embedding row."""
    return held.token if isinstance(held, HeldInput) else held


def token_ids(held: Iterable[Held]) -> list[int]:
    """The token ids, ``EMBEDDED`` for each embedding row."""
    return [one.token if isinstance(one, HeldInput) else one for one in held]


def row_of(held: Held) -> NDArray[np.float32] | None:
    """The embedding row [E]; None for a token."""
    return held.row if isinstance(held, HeldInput) else None


def ahead_of(held: Held) -> int:
    """The number of later tokens in its bidirectional block."""
    return held.ahead if isinstance(held, HeldInput) else 0


def offset_of(held: Held) -> Offset:
    """Its M-RoPE offset from the default position, in time, height and width."""
    return held.offset if isinstance(held, HeldInput) else _AS_A_TOKEN


def held_inputs(
    tokens: NDArray[np.int32],
    *,
    rows: NDArray[np.float32] = NO_ROWS,
    ahead: NDArray[np.int32] = NO_AHEAD,
    offsets: NDArray[np.int32] = NO_OFFSETS,
) -> list[Held]:
    """The inputs of a sequence, from arrays.

    Args:
        tokens: int32 [T], ``EMBEDDED`` for each embedding row.
        rows: the embedding rows, float32 [n, E].
        ahead: for each token, the number of later tokens in its bidirectional block, int32 [T]; [0] without blocks.
        offsets: the offset of each row, int32 [n, 3]; [0, 3] if all rows are at default positions.
    """
    held: list[Held] = tokens.tolist()
    if not len(rows) and not ahead.any():
        return held
    offset_list = offsets.tolist() if len(offsets) else [_AS_A_TOKEN] * len(rows)
    for index, row, offset in zip(np.flatnonzero(tokens == EMBEDDED).tolist(), rows, offset_list, strict=True):
        held[index] = HeldInput(EMBEDDED, row, offset=tuple(offset))
    for index in np.flatnonzero(ahead).tolist():
        one = held[index]
        held[index] = HeldInput(token_of(one), row_of(one), int(ahead[index]), offset_of(one))
    return held


def batch_inputs(batch: Batch) -> list[Held]:
    """The inputs of a batch, one per token."""
    return held_inputs(batch.tokens, rows=batch.embeddings, ahead=batch.ahead, offsets=batch.offsets)


def rows_of(held: Iterable[Held]) -> NDArray[np.float32]:
    """The embedding rows among inputs, float32 [n, E]; [0, 0] if there are none."""
    rows = [row for one in held if (row := row_of(one)) is not None]
    return np.stack(rows) if rows else NO_ROWS


def offsets_of(held: Iterable[Held]) -> NDArray[np.int32]:
    """The offsets of the embedding rows among inputs, int32 [n, 3]; [0, 3] if all are at default positions."""
    offsets = [offset_of(one) for one in held if row_of(one) is not None]
    return np.array(offsets, np.int32) if any(map(any, offsets)) else NO_OFFSETS


def next_mrope_position(held: Iterable[Held], start: int = 0) -> int:
    """The M-RoPE position of the token after these inputs. The first input is at ``start``."""
    for one in held:
        start += max(0, 1 + max(offset_of(one)))
    return start


def from_each(offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Convert offsets from the start of a run of rows, [n, 3], to offsets from the default position of each row."""
    furthest = np.maximum.accumulate(offsets.max(axis=1, initial=-1)) + 1
    defaults = np.concatenate([[0], furthest[:-1]])
    relative: NDArray[np.int32] = (offsets - defaults[:, None]).astype(np.int32)
    return relative


def all_ahead_of(held: Sequence[Held]) -> NDArray[np.int32]:
    """For each input, the number of later tokens in its bidirectional block, int32 [T]; [0] without blocks."""
    ahead = [ahead_of(one) for one in held]
    return np.array(ahead, np.int32) if any(ahead) else NO_AHEAD


def add_held(batch: Batch, held: Sequence[Held], start: Pos) -> None:
    """Add inputs to a batch with room, without logits, to decode them again."""
    index = start.index
    for piece in _pieces(held):
        for is_row, group in groupby(piece, lambda one: row_of(one) is not None):
            run, position = list(group), Pos(start.seq_id, index)
            if is_row:
                batch.add_embeddings(rows_of(run), position, offsets=_from_start(run))
            else:
                batch.extend(token_ids(run), position)
            index += len(run)
        if ahead_of(piece[0]):
            batch.join_block(len(piece))


def chunks_of(held: Sequence[Held], size: int) -> Iterator[Sequence[Held]]:
    """Chunks of at most ``size`` inputs. No chunk splits a bidirectional block; no block is longer than ``size``."""
    first = 0
    while first < len(held):
        end = min(first + size, len(held))
        while end > first and ahead_of(held[end - 1]):
            end -= 1
        yield held[first:end]
        first = end


def are_blocks(ahead: NDArray[np.int32]) -> bool:
    """Whether ``ahead`` [T] describes whole bidirectional blocks: it counts down to 0 within each."""
    inside = ahead[:-1] > 0
    return bool((ahead >= 0).all() and not ahead[-1:].any() and (ahead[1:] == ahead[:-1] - 1)[inside].all())


def check_rows(rows: object, n_embd: int | None = None) -> None:
    """Check embedding rows.

    Args:
        rows: the values.
        n_embd: the required width; None for any.

    Raises:
        InvalidEmbedding: not float32 [n, E], or a number that is infinite or NaN.
    """
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype != np.float32:
        what = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidEmbedding(f"embedding rows are {what} (accepted: a NumPy array, float32 [rows, E])")
    if n_embd is not None and len(rows) and rows.shape[1] != n_embd:
        raise InvalidEmbedding(f"embedding rows are {rows.shape[1]} wide (accepted: {n_embd}, as the model has)")
    if not np.isfinite(rows).all():
        first = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise InvalidEmbedding(f"embedding row {first} of {len(rows)} holds a number that is infinite or none")


def check_offsets(offsets: object, n_rows: int) -> None:
    """Check offsets of embedding rows.

    Args:
        offsets: the values.
        n_rows: the number of rows.

    Raises:
        InvalidEmbedding: not integers [n, 3], or out of range.
    """
    shape = offsets.shape if isinstance(offsets, np.ndarray) and offsets.dtype.kind in "iu" else None
    if not isinstance(offsets, np.ndarray) or shape != (n_rows, 3):
        shape_or_type = (
            f"{offsets.dtype} of shape {offsets.shape}" if isinstance(offsets, np.ndarray) else type(offsets).__name__
        )
        raise InvalidEmbedding(f"offsets are {shape_or_type} (accepted: a NumPy array of integers [{n_rows}, 3])")
    if ((offsets < -MAX_OFFSET) | (offsets > MAX_OFFSET)).any():
        raise InvalidEmbedding(f"offsets are out of range (accepted: {-MAX_OFFSET} to {MAX_OFFSET})")


def _from_start(held: Sequence[Held]) -> NDArray[np.int32] | None:
    """The offsets of rows from the start of their run, [n, 3]; None if they are at default positions."""
    if not any(any(offset_of(one)) for one in held):
        return None
    offsets, default = np.empty((len(held), 3), np.int32), 0
    for i, one in enumerate(held):
        offsets[i] = np.array(offset_of(one)) + default
        default = next_mrope_position([one], default)
    return offsets


def _pieces(held: Sequence[Held]) -> Iterator[Sequence[Held]]:
    """The bidirectional blocks of a run, and the runs between them."""
    begin = 0
    while begin < len(held):
        end = begin + ahead_of(held[begin]) + 1
        if end == begin + 1:
            end = next((i for i in range(end, len(held)) if ahead_of(held[i])), len(held))
        yield held[begin:end]
        begin = end

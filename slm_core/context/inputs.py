"""The inputs of a sequence besides token ids: embedding rows, with M-RoPE offsets and biases, bidirectional blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.embedding_rows import EmbeddingRows
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, LogitsSelection, Pos

NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)
NO_ROWS.flags.writeable = False
NO_AHEAD: NDArray[np.int32] = np.empty(0, np.int32)
NO_AHEAD.flags.writeable = False
NO_OFFSETS: NDArray[np.int32] = np.empty((0, 3), np.int32)
NO_OFFSETS.flags.writeable = False
NO_BIAS: NDArray[np.float32] = np.empty(0, np.float32)
NO_BIAS.flags.writeable = False

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
        offset: its M-RoPE position, relative to the default position of a token at this index.
        bias: the number added to attention scores of other tokens on an embedding row; never NaN.
    """

    token: int
    row: NDArray[np.float32] | None = None
    ahead: int = 0
    offset: Offset = _AS_A_TOKEN
    bias: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeldInput):
            return NotImplemented
        return self._numbers == other._numbers and (
            self.row is other.row
            or (self.row is not None and other.row is not None and np.array_equal(self.row, other.row))
        )

    def __hash__(self) -> int:
        return hash(self._numbers)

    @property
    def _numbers(self) -> tuple[object, ...]:
        """Everything but the row."""
        return self.token, self.ahead, self.offset, self.bias


Held: TypeAlias = int | HeldInput
"""One input of a sequence: a token id, or a record if the id alone does not describe it."""


def token_of(held: Held) -> int:
    """The token id; ``EMBEDDED`` for an embedding row."""
    return held.token if isinstance(held, HeldInput) else held


def token_ids(held: Iterable[Held]) -> list[int]:
    """The token ids, ``EMBEDDED`` for each embedding row."""
    return [one.token if isinstance(one, HeldInput) else one for one in held]


def text_tokens(held: Iterable[Held]) -> list[int]:
    """The token ids, without embedding rows."""
    return [token_of(one) for one in held if row_of(one) is None]


def row_of(held: Held) -> NDArray[np.float32] | None:
    """The embedding row [E]; None for a token."""
    return held.row if isinstance(held, HeldInput) else None


def ahead_of(held: Held) -> int:
    """The number of later tokens in its bidirectional block."""
    return held.ahead if isinstance(held, HeldInput) else 0


def offset_of(held: Held) -> Offset:
    """Its M-RoPE offset from the default position, in time, height and width."""
    return held.offset if isinstance(held, HeldInput) else _AS_A_TOKEN


def bias_of(held: Held) -> float:
    """Its attention bias; 0 for none."""
    return held.bias if isinstance(held, HeldInput) else 0.0


def held_inputs(
    tokens: NDArray[np.int32],
    *,
    rows: NDArray[np.float32] = NO_ROWS,
    ahead: NDArray[np.int32] = NO_AHEAD,
    offsets: NDArray[np.int32] = NO_OFFSETS,
    bias: NDArray[np.float32] = NO_BIAS,
) -> list[Held]:
    """The inputs of a sequence, from arrays.

    Args:
        tokens: int32 [T], ``EMBEDDED`` for each embedding row.
        rows: the embedding rows, float32 [n, E].
        ahead: for each token, the number of later tokens in its bidirectional block, int32 [T]; [0] without blocks.
        offsets: the offset of each row, int32 [n, 3]; [0, 3] if all rows are at default positions.
        bias: the attention bias of each row, float32 [n]; [0] if all are 0.
    """
    held: list[Held] = tokens.tolist()
    if not len(rows) and not ahead.any():
        return held
    offset_list = offsets.tolist() if len(offsets) else [_AS_A_TOKEN] * len(rows)
    bias_list = bias.tolist() if len(bias) else [0.0] * len(rows)
    indices = np.flatnonzero(tokens == EMBEDDED).tolist()
    for index, row, offset, each in zip(indices, rows, offset_list, bias_list, strict=True):
        held[index] = HeldInput(EMBEDDED, row, offset=tuple(offset), bias=each)
    for index in np.flatnonzero(ahead).tolist():
        one = held[index]
        held[index] = HeldInput(token_of(one), row_of(one), int(ahead[index]), offset_of(one), bias_of(one))
    return held


def row_inputs(rows: EmbeddingRows) -> list[Held]:
    """Embedding rows as inputs of a sequence."""
    n = len(rows.rows)
    ahead = np.zeros(n, np.int32)
    for start, end in rows.blocks:
        ahead[start:end] = np.arange(end - start - 1, -1, -1)
    offsets = NO_OFFSETS if rows.offsets is None else from_each(rows.offsets.astype(np.int32))
    bias = NO_BIAS if rows.bias is None else rows.bias
    return held_inputs(np.full(n, EMBEDDED, np.int32), rows=rows.rows, ahead=ahead, offsets=offsets, bias=bias)


def batch_inputs(batch: Batch) -> list[Held]:
    """The inputs of a batch, one per token."""
    return held_inputs(batch.tokens, rows=batch.embeddings, ahead=batch.ahead, offsets=batch.offsets, bias=batch.bias)


def rows_of(held: Iterable[Held]) -> NDArray[np.float32]:
    """The embedding rows among inputs, float32 [n, E]; [0, 0] if there are none."""
    rows = [row for one in held if (row := row_of(one)) is not None]
    return np.stack(rows) if rows else NO_ROWS


def offsets_of(held: Iterable[Held]) -> NDArray[np.int32]:
    """The offsets of the embedding rows among inputs, int32 [n, 3]; [0, 3] if all are at default positions."""
    offsets = [offset_of(one) for one in held if row_of(one) is not None]
    return np.array(offsets, np.int32) if any(map(any, offsets)) else NO_OFFSETS


def biases_of(held: Iterable[Held]) -> NDArray[np.float32]:
    """The attention bias of each embedding row among inputs, float32 [n]; [0] if all are 0."""
    biases = [bias_of(one) for one in held if row_of(one) is not None]
    return np.array(biases, np.float32) if any(biases) else NO_BIAS


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


def add_held(batch: Batch, held: Sequence[Held], start: Pos, *, logits: LogitsSelection = "none") -> None:
    """Add inputs to a batch with room for them; ``logits`` is "none" or "last"."""
    if not has_records(held):
        batch.extend(token_ids(held), start, logits=logits)
        return
    index, end = start.index, start.index + len(held)
    for piece in _pieces(held):
        for is_row, group in groupby(piece, lambda one: row_of(one) is not None):
            run, position = list(group), Pos(start.seq_id, index)
            index += len(run)
            selected: LogitsSelection = logits if index == end else "none"
            if is_row:
                offsets, bias = offsets_from_start(run), biases_of(run)
                batch.add_embeddings(
                    rows_of(run), position, offsets=offsets, bias=bias if len(bias) else None, logits=selected
                )
            else:
                batch.extend(token_ids(run), position, logits=selected)
        if ahead_of(piece[0]):
            batch.join_block(len(piece))


def chunks_of(held: Sequence[Held], size: int) -> Iterator[Sequence[Held]]:
    """Chunks of at most ``size`` inputs. No chunk splits a bidirectional block; no block is longer than ``size``."""
    first = 0
    while first < len(held):
        end = block_boundary(held, min(first + size, len(held)))
        yield held[first:end]
        first = end


def block_boundary(held: Sequence[Held], index: int) -> int:
    """``index``, or the start of the bidirectional block that a split at ``index`` would divide."""
    while index > 0 and ahead_of(held[index - 1]):
        index -= 1
    return index


def has_records(held: Iterable[Held]) -> bool:
    """Whether any input is a record: an embedding row, or in a bidirectional block."""
    return any(isinstance(one, HeldInput) for one in held)


def are_blocks(ahead: NDArray[np.int32]) -> bool:
    """Whether ``ahead`` [T] describes whole bidirectional blocks: it counts down to 0 within each."""
    inside = ahead[:-1] > 0
    return bool((ahead >= 0).all() and not ahead[-1:].any() and (ahead[1:] == ahead[:-1] - 1)[inside].all())


def offsets_from_start(held: Sequence[Held]) -> NDArray[np.int32] | None:
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

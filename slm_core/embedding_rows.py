"""Embedding rows: inputs in place of tokens, such as an encoded image, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.display import signature
from slm_core.errors import InvalidEmbedding, InvalidOption

MAX_OFFSET = 2**20
"""The largest M-RoPE offset. It is larger than any image, and bounds the sums of positions."""

MAX_BIAS = 1000.0
"""The largest attention bias. exp(1000) outweighs every score; float32 keeps the sum of bias and score to 3e-5."""

ROWS_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""The character that stands for embedding rows in the content of a message that has rows; otherwise it is text."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRows:
    """Embedding rows as a part of a message, such as an encoded image. They are copied, and read-only.

    Attributes:
        rows: float32 [n, E]; each takes the place of a token.
        blocks: ranges [start, end) of rows that are bidirectional blocks: each row attends to its whole block.
        offsets: M-RoPE offsets of the rows in time, height and width, integers [n, 3], as in ``Batch.add_embeddings``;
            None for default positions.
        before: text before the rows in which control tokens are parsed, such as "<start_of_image>".
        after: text after the rows, likewise.
        bias: attention bias of each row, float32 [n], as in ``Batch.add_embeddings``; None if all are 0.

    Raises:
        InvalidEmbedding: no rows; rows that are not finite float32 [n, E]; offsets that are not integers [n, 3]; a bias
            that is not float32 [n], or that is NaN or above 1000.
        InvalidOption: blocks that are empty, overlap, or are not in order; ``before`` or ``after`` is not text.
    """

    rows: NDArray[np.float32]
    blocks: Sequence[tuple[int, int]] = ()
    offsets: NDArray[np.integer] | None = None
    before: str = ""
    after: str = ""
    bias: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        check_rows(self.rows)
        if not len(self.rows):
            raise InvalidEmbedding("there are 0 embedding rows (accepted: 1 or more)")
        object.__setattr__(self, "rows", _frozen(self.rows.copy()))
        object.__setattr__(self, "blocks", checked_blocks(self.blocks, len(self.rows)))
        if self.offsets is not None:
            check_offsets(self.offsets, len(self.rows))
            object.__setattr__(self, "offsets", _frozen(self.offsets.astype(np.int32)))
        if self.bias is not None:
            check_bias(self.bias, len(self.rows))
            object.__setattr__(self, "bias", _frozen(self.bias.copy()) if self.bias.any() else None)
        for name in ("before", "after"):
            if not isinstance(getattr(self, name), str):
                raise InvalidOption(f"{name}={getattr(self, name)!r:.80} of embedding rows (accepted: a text)")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EmbeddingRows):
            return NotImplemented
        return self is other or (
            (self.blocks, self.before, self.after) == (other.blocks, other.before, other.after)
            and np.array_equal(self.rows, other.rows)
            and _are_equal(self.offsets, other.offsets)
            and _are_equal(self.bias, other.bias)
        )

    def __hash__(self) -> int:
        return hash((self.rows.shape, self.rows.tobytes(), self.before, self.after))

    def __repr__(self) -> str:
        return signature(self, f"float32 [{self.rows.shape[0]}, {self.rows.shape[1]}]")


def joined_parts(parts: object) -> tuple[str, list[EmbeddingRows]]:
    """A list of texts and embedding rows as one text, in which ``ROWS_MARK`` stands for each of the rows.

    Raises:
        InvalidOption: another value, or ``ROWS_MARK`` in a text together with rows.
    """
    if not isinstance(parts, Sequence) or not all(isinstance(part, str | EmbeddingRows) for part in parts):
        raise InvalidOption(
            f"content={parts!r:.80} of a message (accepted: a text, or a list of texts and EmbeddingRows)"
        )
    rows = [part for part in parts if isinstance(part, EmbeddingRows)]
    content = "".join(part if isinstance(part, str) else ROWS_MARK for part in parts)
    check_marks(content, rows)
    return content, rows


def check_marks(content: str, rows: Sequence[object]) -> None:
    """Check that ``rows`` are ``EmbeddingRows``, and that ``content`` has a ``ROWS_MARK`` for each of them.

    Raises:
        InvalidOption: they are not, or it has another number of marks.
    """
    if not all(isinstance(each, EmbeddingRows) for each in rows):
        raise InvalidOption(f"rows={rows!r:.80} of a message (accepted: EmbeddingRows)")
    if rows and content.count(ROWS_MARK) != len(rows):
        raise InvalidOption(
            f"the content of a message with {len(rows)} EmbeddingRows has {content.count(ROWS_MARK)} characters"
            f" {ROWS_MARK!a} (accepted: {len(rows)}, because this character stands for the rows)"
        )


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
        raise InvalidEmbedding(f"embedding rows are {rows.shape[1]} wide (accepted: {n_embd}, the model's width)")
    if not np.isfinite(rows).all():
        first = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise InvalidEmbedding(f"embedding row {first} of {len(rows)} contains an infinite number or NaN")


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


def check_bias(bias: object, n_rows: int) -> None:
    """Check the attention bias of embedding rows.

    Args:
        bias: the values.
        n_rows: the number of rows.

    Raises:
        InvalidEmbedding: not float32 [n], NaN, or above 1000.
    """
    if not isinstance(bias, np.ndarray) or bias.dtype != np.float32 or bias.shape != (n_rows,):
        shape_or_type = f"{bias.dtype} of shape {bias.shape}" if isinstance(bias, np.ndarray) else type(bias).__name__
        raise InvalidEmbedding(f"the attention bias is {shape_or_type} (accepted: a NumPy array, float32 [{n_rows}])")
    if not (bias <= MAX_BIAS).all():  # not true for NaN either
        bad = bias[~(bias <= MAX_BIAS)][0]
        raise InvalidEmbedding(f"the attention bias has the number {bad} (accepted: -inf, and numbers to {MAX_BIAS:g})")


def checked_blocks(blocks: Sequence[tuple[int, int]], n_rows: int) -> tuple[tuple[int, int], ...]:
    """The ranges of bidirectional blocks, if they are within ``n_rows`` rows, in order, and do not overlap.

    Raises:
        InvalidOption: they are not.
    """
    try:
        ranges = tuple((int(start), int(end)) for start, end in blocks)
    except (TypeError, ValueError):
        raise InvalidOption(f"blocks={blocks!r:.80} (accepted: ranges, such as [(0, {n_rows})])") from None
    previous = 0
    for start, end in ranges:
        if not previous <= start < end <= n_rows:
            raise InvalidOption(
                f"block [{start}, {end}) of {n_rows} rows (accepted: ranges in order that do not overlap, within"
                f" 0 to {n_rows})"
            )
        previous = end
    return ranges


def _are_equal(one: NDArray[np.generic] | None, other: NDArray[np.generic] | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _frozen(numbers: NDArray[np.generic]) -> NDArray[np.generic]:
    numbers.flags.writeable = False
    return numbers

"""Embedding rows of sessions and messages in dumps, in the form of a sequence's dump."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from slm_core.context.inputs import (
    Held,
    all_ahead_of,
    are_blocks,
    biases_of,
    offsets_from_start,
    offsets_of,
    row_inputs,
    row_of,
    rows_of,
    token_ids,
)
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import InvalidEmbedding, InvalidSnapshot, OptionError


def write_inputs(inputs: Sequence[Held]) -> bytes:
    """Inputs of a sequence as bytes."""
    return SequenceSnapshot(
        backend="",
        payload_format="",
        fingerprint="",
        tokens=np.array(token_ids(inputs), np.int32),
        edits=(),
        payload=b"",
        rows=rows_of(inputs),
        ahead=all_ahead_of(inputs),
        offsets=offsets_of(inputs),
        bias=biases_of(inputs),
    ).to_bytes()


def read_inputs(data: bytes) -> list[Held]:
    """Inputs of a sequence from the result of ``write_inputs``; every value is checked, except for the range of tokens.

    Raises:
        InvalidSnapshot: an invalid value.
    """
    snapshot = SequenceSnapshot.from_bytes(data)
    if snapshot.edits or snapshot.payload or snapshot.adapters:
        raise InvalidSnapshot("the dump's embedding rows are malformed")
    inputs = snapshot.held()
    if not are_blocks(all_ahead_of(inputs)):
        raise InvalidSnapshot("the dump holds parts of bidirectional blocks")
    return inputs


def write_rows(rows: EmbeddingRows, sections: list[bytes]) -> dict[str, str]:
    """The texts of embedding rows as JSON values; the numbers are appended to ``sections`` as one section."""
    sections.append(write_inputs(row_inputs(rows)))
    return {"before": rows.before, "after": rows.after}


def read_rows(stored: object, sections: Iterator[bytes]) -> EmbeddingRows:
    """Embedding rows from the result of ``write_rows``; the numbers are the next of ``sections``.

    Raises:
        InvalidSnapshot: an invalid value, or there is no next section.
    """
    data = next(sections, None)
    if data is None or not isinstance(stored, Mapping) or set(stored) != {"before", "after"}:
        raise InvalidSnapshot("the dump's embedding rows are malformed")
    inputs = read_inputs(data)
    if not all(row_of(each) is not None for each in inputs):
        raise InvalidSnapshot("the dump's embedding rows are malformed")
    try:
        bias = biases_of(inputs) if len(biases_of(inputs)) else None
        return EmbeddingRows(rows_of(inputs), _blocks(inputs), offsets_from_start(inputs), bias=bias, **stored)
    except (InvalidEmbedding, OptionError) as error:
        raise InvalidSnapshot(f"the dump's embedding rows are malformed: {error}") from error


def _blocks(inputs: Sequence[Held]) -> list[tuple[int, int]]:
    """The ranges of bidirectional blocks."""
    blocks = list[tuple[int, int]]()
    for i, n_ahead in enumerate(all_ahead_of(inputs).tolist()):
        if n_ahead and (not blocks or i >= blocks[-1][1]):
            blocks.append((i, i + n_ahead + 1))
    return blocks

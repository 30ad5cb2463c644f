"""Mutants that lose, move or confuse embedding rows of sessions and chats."""

from __future__ import annotations

import dataclasses
from typing import Any

from slm_conformance.mutants.above import breaks
from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.chat import Session, decoded, records, session_dump
from slm_core.chat.row_prompts import RowPromptEncoder
from slm_core.chat.source import SessionSource
from slm_core.context.inputs import Held, HeldInput, row_of, token_ids
from slm_core.embedding_rows import EmbeddingRows
from slm_core.protocols import Context
from slm_core.types import EMBEDDED, EditLevel

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


@mutant("TestEmbeddingInput::test_as_declared")
class RowsOfNoWidth(ToyContext):
    """``n_embd`` is 0, although the context takes embedding rows."""

    n_embd = 0


@breaks("TestSessionRows::test_edits", Session, "append_rows")
def RowsAreReversed(original: Any, session: Session, rows: Any, **options: Any) -> None:
    """Appended rows are in reverse order."""
    original(session, rows[::-1], **options)


@breaks("TestSessionRows::test_refused", records, "check_records")
def RowsAreNotChecked(original: Any, context: Context, inputs: Any) -> None:
    """Rows of any width are appended; the next decode raises."""


@breaks("TestSessionRows::test_edits", SessionSource, "take_out")
def RemovalsSortTheRows(original: Any, source: SessionSource, start: int, end: int, **options: Any) -> EditLevel:
    """After a removal, the later rows are in another order."""
    level: EditLevel = original(source, start, end, **options)
    later = source.inputs[start:]
    rows = iter([one for one in later if row_of(one) is not None][::-1])
    source.inputs = [*source.inputs[:start], *(one if row_of(one) is None else next(rows) for one in later)]
    return level


@breaks("TestSessionRows::test_other_rows", Session, "follow")
def AllRowsAreEqual(original: Any, session: Session, inputs: Any) -> None:
    """``follow`` keeps rows that have the positions of other rows."""
    if token_ids(inputs) != list(session.tokens):
        original(session, inputs)


@breaks("TestSessionRows::test_fork_and_scratch", Session, "fork")
def ForksLosePendingRows(original: Any, session: Session, seq_id: int | None = None) -> Session:
    """A fork lacks the rows that are not decoded yet."""
    copied: Session = original(session, seq_id)
    copied._source.inputs = [one for one in copied._source.inputs if row_of(one) is None]
    return copied


@breaks("TestSessionRows::test_generate_and_dump", session_dump, "write")
def DumpsRepeatTheFirstRow(original: Any, state: Any) -> bytes:
    """In a dump, all rows of the history are its first row."""
    first = next((row for one in state.inputs if (row := row_of(one)) is not None), None)
    inputs = tuple(one if row_of(one) is None else HeldInput(EMBEDDED, first) for one in state.inputs)
    return bytes(original(dataclasses.replace(state, inputs=inputs)))


@breaks("TestSessionRows::test_blocks", decoded, "block_boundary")
def BatchesDivideBlocks(original: Any, inputs: Any, index: int) -> int:
    """A block that does not fit into the rest of a batch is decoded in two batches."""
    return index


@breaks("TestSessionRows::test_a_message", RowPromptEncoder, "_inputs")
def MessagesKeepTheirRows(original: Any, encoder: RowPromptEncoder, rows: EmbeddingRows) -> list[Held]:
    """An edited message keeps its old rows if the number of rows does not change."""
    known = next((inputs for _, inputs in encoder._known.values() if len(inputs) == len(rows.rows)), None)
    encoder._known[id(rows)] = rows, known or original(encoder, rows)
    return encoder._known[id(rows)][1]


@breaks("TestMropePositions::test_in_a_session", records, "row_inputs")
def SessionsIgnoreOffsets(original: Any, rows: EmbeddingRows) -> list[Held]:
    """Rows that are appended to a session have the default M-RoPE positions."""
    inputs: list[Held] = original(dataclasses.replace(rows, offsets=None))
    return inputs

"""Toys that take embedding rows for something else, lose them, or hold them wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, Step
from slm_core.context.batch import TokenBatch
from slm_core.context.inputs import Held, HeldInput, row_of, token_of
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, Capability, Logits, Pos, States


@mutant("TestEmbeddingInput::test_as_declared")
class RowsAreMissing(ToyContext):
    """Embedding rows are not declared, and a batch with rows raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.EMBEDDING_INPUT}

    def _check_rows(self, rows: Array) -> None:
        if len(rows):
            raise NotImplementedError


@mutant("TestEmbeddingInput::test_dumps_as_declared")
class DumpsBringRows(ToyContext):
    """Embedding rows are not declared, but dumps with rows are restored."""

    capabilities = ToyContext.capabilities - {Capability.EMBEDDING_INPUT}

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        self.capabilities = ToyContext.capabilities
        super()._check_snapshot(seq_id, snapshot)
        del self.capabilities


@mutant("TestEmbeddingInput::test_rows_of_the_table")
class LateEmbeddingsScaled(ToyContext):
    """Past position 90, logits of rows are 1 % too large."""

    def decode(self, batch: Batch) -> Logits:
        """Scale."""
        rows = super().decode(batch)
        late = (batch.positions > 90) & (batch.tokens == EMBEDDED)
        rows[late[batch.logits_mask]] *= 1.01
        return rows


@mutant("TestEmbeddingInput::test_rows_that_no_token_has")
class NearestToken(ToyContext):
    """A row is replaced by the token with the nearest embedding."""

    def _ran(self, batch: Batch, step: Step, width: int) -> Array:
        table = self.engine.table

        def nearest(token: Held, past: Sequence[Cell]) -> tuple[Cell, Array]:
            if (row := row_of(token)) is not None:
                token = HeldInput(token_of(token), table[int(np.argmin(np.square(table - row).sum(axis=1)))])
            return step(token, past)

        return super()._ran(batch, nearest, width)


@mutant("TestEmbeddingInput::test_among_tokens")
class RowsChangePlaces(ToyContext):
    """In a batch of several sequences, each row is replaced by the row before it."""

    def decode(self, batch: Batch) -> Logits:
        """Roll the rows."""
        if len(set(batch.seq_ids.tolist())) < 2 or len(batch.embeddings) < 2:
            return super().decode(batch)
        rolled, before = TokenBatch(len(batch)), iter(np.roll(batch.embeddings, 1, axis=0)[:, None])
        places = zip(batch.tokens.tolist(), batch.seq_ids.tolist(), batch.positions.tolist(), strict=True)
        for (token, seq_id, index), has_logits in zip(places, batch.logits_mask.tolist(), strict=True):
            if token == EMBEDDED:
                rolled.add_embeddings(next(before), Pos(seq_id, index), logits="last" if has_logits else "none")
            else:
                rolled.add(token, Pos(seq_id, index), logits=has_logits)
        return super().decode(rolled)


@mutant("TestEmbeddingInput::test_what_is_held")
class RowsAreTokenZero(ToyContext):
    """A sequence that ends with a token lists token 0 in place of ``EMBEDDED``."""

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """Hide the rows."""
        tokens = super().tokens(seq_id)
        return tokens if not tokens or tokens[-1] == EMBEDDED else tuple(max(token, 0) for token in tokens)


@mutant("TestEmbeddingInput::test_hidden_states")
class StatesOfRowsScaled(ToyContext):
    """Hidden states of rows are 1 % too large."""

    def embed(self, batch: Batch) -> States:
        """Scale."""
        return super().embed(batch) * np.float32(1.01 if len(batch.embeddings) else 1)


@mutant("TestEmbeddingInput::test_truncate_and_fork")
class ForkEndsInAToken(ToyContext):
    """If a fork of a part ends with a row, the row's value is too large."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Spoil the last cell."""
        place = super().fork(src, dst, end)
        if self.cells[dst] and len(self.cells[dst]) < len(self.cells[src]):
            last = self.cells[dst][-1]
            if row_of(last.token) is not None:
                self.cells[dst][-1] = dataclasses.replace(last, values=last.values * np.float32(1.5))
        return place


@mutant("TestEmbeddingInput::test_cut")
class RowsAreNotRotated(ToyContext):
    """In a sequence of rows only, a cut does not rotate keys."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave them."""
        after, history = super().without(cells, edits, first, last)
        if all(row_of(cell.token) is not None for cell in cells):
            return cells[:first] + cells[last:], history
        return after, history


@mutant("TestEmbeddingInput::test_dump_and_restore")
class DumpsLoseRows(ToyContext):
    """The payload of a dump has zeros for the values of rows."""

    def packed(self, cells: list[Cell]) -> bytes:
        """Leave them out."""
        nothing = np.zeros_like(cells[0].values) if cells else np.empty(0, np.float32)
        return super().packed(
            [Cell(cell.token, cell.keys, nothing) if row_of(cell.token) is not None else cell for cell in cells]
        )


@mutant("TestEmbeddingInput::test_decoded_again")
class RowsReturnReversed(ToyContext):
    """Rows that are decoded again come in reverse order."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(dataclasses.replace(snapshot, rows=snapshot.rows[::-1]))


@mutant("TestEmbeddingInput::test_refusals")
class TokensBeforeBadRows(ToyContext):
    """Tokens are decoded before rows of another width are refused."""

    def decode(self, batch: Batch) -> Logits:
        """Run what is sound."""
        sound = np.flatnonzero(batch.tokens != EMBEDDED)
        if len(batch.embeddings) and batch.embeddings.shape[1] != self.engine.shape.n_embd and len(sound):
            part = self.new_batch()
            part.extend(batch.tokens[sound], Pos(int(batch.seq_ids[0]), int(batch.positions[0])))
            super().decode(part)
        return super().decode(batch)


@mutant("TestEmbeddingInput::test_hostile_dumps")
class WideRowsAreCut(ToyContext):
    """Rows of a dump that are too wide are truncated."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Cut them."""
        snapshot = SequenceSnapshot.from_bytes(data)
        width = self.engine.shape.n_embd
        if snapshot.rows.size and snapshot.rows.shape[1] > width:
            data = dataclasses.replace(snapshot, rows=snapshot.rows[:, :width]).to_bytes()
        return super().restore(seq_id, data)

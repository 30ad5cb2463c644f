"""Mutants that replace embedding rows, lose them, or compute wrong values for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, Run
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
    """Past position 90, logits of embedding rows are 1 % too large."""

    def decode(self, batch: Batch) -> Logits:
        """Multiply the logits of late embedding rows by 1.01."""
        rows = super().decode(batch)
        late = (batch.positions > 90) & (batch.tokens == EMBEDDED)
        rows[late[batch.logits_mask]] *= 1.01
        return rows


@mutant("TestEmbeddingInput::test_rows_that_no_token_has")
class NearestToken(ToyContext):
    """An embedding row is replaced by the nearest embedding of a token."""

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        table = self.engine.table

        def nearest(held: Held) -> Held:
            if (row := row_of(held)) is None:
                return held
            return HeldInput(token_of(held), table[int(np.argmin(np.square(table - row).sum(axis=1)))])

        return super()._run_batch(batch, lambda inputs, past: run([nearest(one) for one in inputs], past), width)


@mutant("TestEmbeddingInput::test_among_tokens")
class RowsChangePlaces(ToyContext):
    """In a batch of several sequences, each embedding row is replaced by the row before it."""

    def decode(self, batch: Batch) -> Logits:
        """Shift the embedding rows of the batch by one."""
        if len(set(batch.seq_ids.tolist())) < 2 or len(batch.embeddings) < 2:
            return super().decode(batch)
        rolled, before = TokenBatch(len(batch)), iter(np.roll(batch.embeddings, 1, axis=0)[:, None])
        inputs = zip(batch.tokens.tolist(), batch.seq_ids.tolist(), batch.positions.tolist(), strict=True)
        for (token, seq_id, index), has_logits in zip(inputs, batch.logits_mask.tolist(), strict=True):
            if token == EMBEDDED:
                rolled.add_embeddings(next(before), Pos(seq_id, index), logits="last" if has_logits else "none")
            else:
                rolled.add(token, Pos(seq_id, index), logits=has_logits)
        return super().decode(rolled)


@mutant("TestEmbeddingInput::test_what_is_held")
class RowsAreTokenZero(ToyContext):
    """A sequence that ends with a token lists token 0 in place of ``EMBEDDED``."""

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """Replace ``EMBEDDED`` by 0, unless the last token is ``EMBEDDED``."""
        tokens = super().tokens(seq_id)
        return tokens if not tokens or tokens[-1] == EMBEDDED else tuple(max(token, 0) for token in tokens)


@mutant("TestEmbeddingInput::test_hidden_states")
class StatesOfRowsScaled(ToyContext):
    """Hidden states of batches with embedding rows are 1 % too large."""

    def embed(self, batch: Batch) -> States:
        """Multiply the hidden states by 1.01 if the batch has embedding rows."""
        return super().embed(batch) * np.float32(1.01 if len(batch.embeddings) else 1)


@mutant("TestEmbeddingInput::test_truncate_and_fork")
class ForkEndsInAToken(ToyContext):
    """If a fork of a prefix ends with an embedding row, the value of this row is 50 % too large."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Multiply the last value of the fork by 1.5 if it belongs to an embedding row."""
        returned = super().fork(src, dst, end)
        if self.cells[dst] and len(self.cells[dst]) < len(self.cells[src]):
            last = self.cells[dst][-1]
            if row_of(last.token) is not None:
                self.cells[dst][-1] = dataclasses.replace(last, values=last.values * np.float32(1.5))
        return returned


@mutant("TestEmbeddingInput::test_cut")
class RowsAreNotRotated(ToyContext):
    """In a sequence of embedding rows only, a cut does not rotate keys."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave the keys as they were if the sequence has no tokens."""
        after, history = super().cut_cells(cells, edits, first, last)
        if all(row_of(cell.token) is not None for cell in cells):
            return cells[:first] + cells[last:], history
        return after, history


@mutant("TestEmbeddingInput::test_dump_and_restore")
class DumpsLoseRows(ToyContext):
    """The payload of a dump has zeros for the values of embedding rows."""

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Write zeros for the values of embedding rows."""
        nothing = np.zeros_like(cells[0].values) if cells else np.empty(0, np.float32)
        return super().pack_payload(
            [Cell(cell.token, cell.keys, nothing) if row_of(cell.token) is not None else cell for cell in cells]
        )


@mutant("TestEmbeddingInput::test_decoded_again")
class RowsReturnReversed(ToyContext):
    """Embedding rows that are decoded again come in reverse order."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(dataclasses.replace(snapshot, rows=snapshot.rows[::-1]))


@mutant("TestEmbeddingInput::test_refusals")
class TokensBeforeBadRows(ToyContext):
    """The tokens of a batch are decoded before its embedding rows of the wrong width are refused."""

    def decode(self, batch: Batch) -> Logits:
        """Decode the tokens first if the embedding rows have the wrong width."""
        sound = np.flatnonzero(batch.tokens != EMBEDDED)
        if len(batch.embeddings) and batch.embeddings.shape[1] != self.engine.shape.n_embd and len(sound):
            part = self.new_batch()
            part.extend(batch.tokens[sound], Pos(int(batch.seq_ids[0]), int(batch.positions[0])))
            super().decode(part)
        return super().decode(batch)


@mutant("TestEmbeddingInput::test_hostile_dumps")
class WideRowsAreCut(ToyContext):
    """Embedding rows of a dump that are too wide are truncated."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Truncate the embedding rows to the model's width."""
        snapshot = SequenceSnapshot.from_bytes(data)
        width = self.engine.shape.n_embd
        if snapshot.rows.size and snapshot.rows.shape[1] > width:
            data = dataclasses.replace(snapshot, rows=snapshot.rows[:, :width]).to_bytes()
        return super().restore(seq_id, data)

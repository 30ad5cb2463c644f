"""Mutants whose hidden states are wrong, or change the context's later results."""

from __future__ import annotations

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Run
from slm_core.protocols import Batch
from slm_core.types import Capability, Pos, States


@mutant("TestEmbeddings::test_as_declared")
class EmbedIsMissing(ToyContext):
    """Embeddings are not declared, and ``embed`` raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.EMBEDDINGS}

    def embed(self, batch: Batch) -> States:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError


@mutant("TestEmbeddings::test_as_declared")
class StatesAreDoubles(ToyContext):
    """Hidden states are float64."""

    def embed(self, batch: Batch) -> States:
        """Convert the hidden states to float64."""
        return super().embed(batch).astype(np.float64)


@mutant("TestEmbeddings::test_against_the_reference")
class LateStatesScaled(ToyContext):
    """Past position 90, hidden states are 1 % too large."""

    def embed(self, batch: Batch) -> States:
        """Multiply the late rows by 1.01."""
        rows = super().embed(batch)
        rows[batch.positions[batch.logits_mask] > 90] *= 1.01
        return rows


@mutant("TestEmbeddings::test_among_strangers")
class StatesOfStrangers(ToyContext):
    """If sequences are interleaved in a batch, the first row is that of the batch's first token."""

    def embed(self, batch: Batch) -> States:
        """Overwrite the first row with the hidden state of the first token."""
        turns = np.count_nonzero(np.diff(batch.seq_ids)) > len(set(batch.seq_ids.tolist()))
        before = [list(cells) for cells in self.cells]
        rows = super().embed(batch)
        if turns:
            rows[0] = self.engine.state(int(batch.tokens[0]), before[int(batch.seq_ids[0])])[1]
        return rows


@mutant("TestEmbeddings::test_rows_asked_for")
class StatesOfTheFirst(ToyContext):
    """If at least two rows of one sequence are requested, but not all, the rows of the first tokens are returned."""

    def embed(self, batch: Batch) -> States:
        """Request all rows and return the first ones, unless the batch has several sequences."""
        n, mask = len(batch), batch.logits_mask
        one = len(set(batch.seq_ids.tolist())) == 1
        if not one or mask.all() or mask.sum() < 2:
            return super().embed(batch)
        with_all_rows = self.new_batch()
        with_all_rows.extend(batch.tokens, Pos(int(batch.seq_ids[0]), int(batch.positions[0])), logits="all")
        assert len(with_all_rows) == n
        return super().embed(with_all_rows)[: int(mask.sum())]


@mutant("TestEmbeddings::test_in_turns_with_decode")
class StatesInTheCache(ToyContext):
    """Tokens that are embedded after a decode have values that are 50 % too large."""

    def embed(self, batch: Batch) -> States:
        """Multiply the values of the batch's tokens by 1.5 after a decode."""
        decoded = self.decoded
        rows = super().embed(batch)
        if decoded and len(batch):
            for cell in self.cells[int(batch.seq_ids[0])][-len(batch) :]:
                cell.values[...] *= 1.5
        return rows

    decoded = False

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        self.decoded |= width == self.engine.n_vocab
        return super()._run_batch(batch, run, width)


@mutant("TestEmbeddings::test_refusals")
class EmbedsThenChecks(ToyContext):
    """Tokens before a token outside the vocabulary are embedded before the batch is refused."""

    def embed(self, batch: Batch) -> States:
        """Embed the tokens before the invalid token first."""
        bad = np.flatnonzero(batch.tokens >= self.engine.n_vocab)
        if len(bad) and bad[0] > 0:
            part = self.new_batch()
            part.extend(batch.tokens[: bad[0]], Pos(int(batch.seq_ids[0]), int(batch.positions[0])))
            super().embed(part)
        return super().embed(batch)


@mutant("TestEmbeddings::test_pooled")
class ThreeIsACrowd(ToyContext):
    """In a batch of three or more sequences, the last row is a copy of the first."""

    def embed(self, batch: Batch) -> States:
        """Overwrite the last row with the first if the batch has more than two sequences."""
        rows = super().embed(batch)
        if len(set(batch.seq_ids.tolist())) > 2 and len(rows) > 2:
            rows[-1] = rows[0]
        return rows

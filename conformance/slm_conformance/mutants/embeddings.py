"""Toys whose hidden states are wrong, or cost the context something."""

from __future__ import annotations

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Step
from slm_core.protocols import Batch
from slm_core.types import Capability, Pos, States


@mutant("TestEmbeddings::test_as_declared")
class EmbedIsMissing(ToyContext):
    """Embeddings are not declared, and ``embed`` raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.EMBEDDINGS}

    def embed(self, batch: Batch) -> States:
        """Raise."""
        raise NotImplementedError


@mutant("TestEmbeddings::test_as_declared")
class StatesAreDoubles(ToyContext):
    """Hidden states are float64."""

    def embed(self, batch: Batch) -> States:
        """Widen."""
        return super().embed(batch).astype(np.float64)


@mutant("TestEmbeddings::test_against_the_reference")
class LateStatesScaled(ToyContext):
    """Past position 90 hidden states are 1 % too large."""

    def embed(self, batch: Batch) -> States:
        """Scale."""
        rows = super().embed(batch)
        rows[batch.positions[batch.logits_mask] > 90] *= 1.01
        return rows


@mutant("TestEmbeddings::test_among_strangers")
class StatesOfStrangers(ToyContext):
    """If sequences are interleaved in a batch, the first row is that of the token before it."""

    def embed(self, batch: Batch) -> States:
        """Mix."""
        turns = np.count_nonzero(np.diff(batch.seq_ids)) > len(set(batch.seq_ids.tolist()))
        before = [list(cells) for cells in self.cells]
        rows = super().embed(batch)
        if turns:
            rows[0] = self.engine.state(int(batch.tokens[0]), before[int(batch.seq_ids[0])])[1]
        return rows


@mutant("TestEmbeddings::test_rows_asked_for")
class StatesOfTheFirst(ToyContext):
    """If some rows are requested, but not all and not only the last, those of the first tokens are returned."""

    def embed(self, batch: Batch) -> States:
        """Take the first; a batch of several sequences takes another path."""
        n, mask = len(batch), batch.logits_mask
        one = len(set(batch.seq_ids.tolist())) == 1
        if not one or mask.all() or mask.sum() < 2:
            return super().embed(batch)
        whole = self.new_batch()
        whole.extend(batch.tokens, Pos(int(batch.seq_ids[0]), int(batch.positions[0])), logits="all")
        assert len(whole) == n
        return super().embed(whole)[: int(mask.sum())]


@mutant("TestEmbeddings::test_in_turns_with_decode")
class StatesInTheCache(ToyContext):
    """Tokens that are embedded after a decode have values that are too large."""

    def embed(self, batch: Batch) -> States:
        """Spoil what is held."""
        decoded = self.decoded
        rows = super().embed(batch)
        if decoded and len(batch):
            for cell in self.cells[int(batch.seq_ids[0])][-len(batch) :]:
                cell.values[...] *= 1.5
        return rows

    decoded = False

    def _ran(self, batch: Batch, step: Step, width: int) -> Array:
        self.decoded |= width == self.engine.n_vocab
        return super()._ran(batch, step, width)


@mutant("TestEmbeddings::test_refusals")
class EmbedsThenChecks(ToyContext):
    """In a batch with a token outside the vocabulary, the tokens before it are embedded."""

    def embed(self, batch: Batch) -> States:
        """Run what is sound."""
        bad = np.flatnonzero(batch.tokens >= self.engine.n_vocab)
        if len(bad) and bad[0] > 0:
            part = self.new_batch()
            part.extend(batch.tokens[: bad[0]], Pos(int(batch.seq_ids[0]), int(batch.positions[0])))
            super().embed(part)
        return super().embed(batch)


@mutant("TestEmbeddings::test_pooled")
class ThreeIsACrowd(ToyContext):
    """In a batch of three sequences, the third attends to the first one's first token in place of its own."""

    def embed(self, batch: Batch) -> States:
        """Mix."""
        rows = super().embed(batch)
        if len(set(batch.seq_ids.tolist())) > 2 and len(rows) > 2:
            rows[-1] = rows[0]
        return rows

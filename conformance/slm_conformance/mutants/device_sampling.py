"""Mutants whose top logits are wrong, or change the context's later results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array
from slm_core.protocols import Batch
from slm_core.types import Capability, Logits, Pos, TopLogits


@mutant("TestDeviceSampling::test_as_declared")
class TopIsMissing(ToyContext):
    """Sampling on the device is not declared, and ``decode_top`` raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.DEVICE_SAMPLING}

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError


@mutant("TestDeviceSampling::test_as_declared")
class TopTokensAreWide(ToyContext):
    """The tokens of ``decode_top`` are int64."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Convert the tokens to int64."""
        top = super().decode_top(batch, k)
        return TopLogits(top.tokens.astype(np.int64), top.logits, top.log_totals)


@mutant("TestDeviceSampling::test_of_the_rows_of_decode")
class TotalOfTheTop(ToyContext):
    """Past position 30, the log-sum-exp is computed from the returned logits only."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Compute the log-sum-exp of late rows from the k returned logits."""
        top = super().decode_top(batch, k)
        few = np.log(np.exp(top.logits).sum(axis=1))
        late = batch.positions[batch.logits_mask] > 30
        return TopLogits(top.tokens, top.logits, np.where(late, few, top.log_totals).astype(np.float32))


@mutant("TestDeviceSampling::test_of_the_rows_of_decode")
class TopIsUnsorted(ToyContext):
    """More than 20 top logits are sorted by token id."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Sort the top logits by token id if k is above 20."""
        top = super().decode_top(batch, k)
        if k <= 20:
            return top
        order = top.tokens.argsort(axis=1)
        return TopLogits(
            np.take_along_axis(top.tokens, order, 1), np.take_along_axis(top.logits, order, 1), top.log_totals
        )


@mutant("TestDeviceSampling::test_rows_asked_for")
class TopOfTheFirst(ToyContext):
    """If a batch of several sequences requests only some rows, the rows of its first tokens are returned."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Set ``first`` if the batch has several sequences and requests only some rows."""
        self.first = len(set(batch.seq_ids.tolist())) > 1 and not batch.logits_mask.all()
        top = super().decode_top(batch, k)
        self.first = False
        return top

    first = False

    def decode(self, batch: Batch) -> Logits:
        """Request all rows and return the first ones if ``first`` is set."""
        if not self.first:
            return super().decode(batch)
        original = self.new_batch()
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            original.add(int(token), Pos(int(seq_id), int(position)), logits=True)
        return super().decode(original)[: int(batch.logits_mask.sum())]


@mutant("TestDeviceSampling::test_in_turns_with_decode")
class TopIsOverwritten(ToyContext):
    """The next call overwrites the logits that ``decode_top`` returned."""

    kept: Sequence[Array] = ()

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Keep a reference to the returned arrays."""
        top = super().decode_top(batch, k)
        self.kept = top.logits, top.log_totals
        return top

    def decode(self, batch: Batch) -> Logits:
        """Overwrite the arrays of the previous ``decode_top`` with zeros."""
        for values in self.kept:
            values[...] = 0
        return super().decode(batch)


@mutant("TestDeviceSampling::test_refusals")
class AnyNumberIsTop(ToyContext):
    """A ``k`` out of range is clamped."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Clamp k to the size of the vocabulary."""
        return super().decode_top(batch, min(max(k, 1), self.engine.n_vocab))

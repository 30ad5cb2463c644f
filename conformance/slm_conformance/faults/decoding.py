"""Toys that decode wrongly, or the wrong things."""

from __future__ import annotations

import numpy as np

from slm_conformance.faults.registry import fault
from slm_conformance.toy_context import ToyContext
from slm_conformance.toy_engine import Cell
from slm_core.errors import ContextFull, DecodeFailed
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


@fault("TestDecode::test_strangers_in_a_batch")
class BatchLeaks(ToyContext):
    """A token sees the tokens of other sequences that stand before it in the batch."""

    def decode(self, batch: Batch) -> Logits:
        """Leak."""
        with self._call():
            self._check_batch(batch)
            rows = []
            seen: list[tuple[int, Cell]] = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                strangers = [cell for other, cell in seen if other != seq_id]
                cell, logits = self.engine.step(token, strangers + self.cells[seq_id])
                self.cells[seq_id] = [*self.cells[seq_id], cell]
                seen.append((seq_id, cell))
                rows.append(logits)
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecode::test_rows_come_in_the_order_of_the_batch")
class RowsBySequence(ToyContext):
    """Rows come sequence by sequence, not in the order of the batch."""

    def decode(self, batch: Batch) -> Logits:
        """Sort."""
        rows = super().decode(batch)
        return rows[np.argsort(batch.seq_ids[batch.wants_logits], kind="stable")]


@fault("TestDecode::test_a_prompt_in_chunks")
class ChunksForgetEachOther(ToyContext):
    """A token sees those of its own batch only."""

    def decode(self, batch: Batch) -> Logits:
        """Begin anew."""
        with self._call():
            self._check_batch(batch)
            fresh: list[list[Cell]] = [[] for _ in self.cells]
            rows = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                cell, logits = self.engine.step(token, fresh[seq_id])
                fresh[seq_id].append(cell)
                rows.append(logits)
            self.cells = [old + new for old, new in zip(self.cells, fresh, strict=True)]
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecode::test_rows_not_asked_for")
class AllRows(ToyContext):
    """``decode`` gives a row for every token, asked for or not."""

    def decode(self, batch: Batch) -> Logits:
        """Ask for all."""
        whole = self.new_batch()
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            whole.add(int(token), Pos(int(seq_id), int(position)), logits=True)
        return super().decode(whole)


@fault("TestDecodeRefusals::test_a_bad_run_after_a_good_one")
class DirtyAfterRefusal(ToyContext):
    """Tokens before a bad one are decoded, then the bad one is refused."""

    def decode(self, batch: Batch) -> Logits:
        """Check while decoding."""
        rows = []
        for i in range(len(batch)):
            one = self.new_batch(1)
            one.add(int(batch.tokens[i]), Pos(int(batch.seq_ids[i]), int(batch.positions[i])), logits=True)
            rows.append(super().decode(one)[0])
        return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecodeRefusals::test_a_position_that_is_not_the_next")
class PositionsIgnored(ToyContext):
    """Tokens are appended, whatever positions the batch gives them."""

    def _check_batch(self, batch: Batch) -> None:
        if len(batch) > self.n_free:
            raise ContextFull(len(batch), self.n_free)


@fault("TestDecodeLimits::test_overflow_in_prefill")
class WrongErrorType(ToyContext):
    """A full context raises ``DecodeFailed``."""

    def decode(self, batch: Batch) -> Logits:
        """Hide what is the matter."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise DecodeFailed("the engine returned 1") from error


@fault("TestDecodeLimits::test_overflow_in_generation")
class NeededAndFreeSwapped(ToyContext):
    """``ContextFull`` says free where it means needed."""

    def decode(self, batch: Batch) -> Logits:
        """Swap."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise ContextFull(error.free, error.needed) from error

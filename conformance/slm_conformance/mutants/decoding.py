"""Mutants that decode wrongly, or accept wrong batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.batch import TokenBatch
from slm_core.context.snapshot import Edit
from slm_core.errors import ContextFull, DecodeFailed
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


class _Leaks(ToyContext):
    """A context whose tokens also attend to the cells that ``leaked`` returns."""

    def decode(self, batch: Batch) -> Logits:
        """Decode each token with the leaked cells before the cells of its own sequence."""
        with self._call():
            self._check_batch(batch)
            rows = []
            seen: list[tuple[int, Cell]] = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                cell, logits = self.engine.step(token, self.leaked(seen, seq_id) + self.cells[seq_id])
                self.cells[seq_id] = [*self.cells[seq_id], cell]
                seen.append((seq_id, cell))
                rows.append(logits)
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.logits_mask]

    def leaked(self, seen: list[tuple[int, Cell]], seq_id: int) -> list[Cell]:
        """The leaked cells, chosen from ``seen``: the earlier cells of the batch, each with its sequence."""
        raise NotImplementedError


@mutant("TestDecode::test_strangers_in_a_batch")
class BatchLeaks(_Leaks):
    """A token attends to tokens of other sequences that come before it in the batch."""

    def leaked(self, seen: list[tuple[int, Cell]], seq_id: int) -> list[Cell]:
        """Return the cells of all other sequences."""
        return [cell for other, cell in seen if other != seq_id]


@mutant("TestDecode::test_strangers_in_a_batch")
class InterleavedSequencesLeak(_Leaks):
    """If sequences are interleaved, a token attends to other sequences' tokens since its sequence's last token."""

    def leaked(self, seen: list[tuple[int, Cell]], seq_id: int) -> list[Cell]:
        """Return all cells after the last cell of the token's own sequence."""
        of_sequence = [i for i, (other, _) in enumerate(seen) if other == seq_id]
        return [cell for _, cell in seen[of_sequence[-1] + 1 :]] if of_sequence else []


@mutant("TestDecode::test_rows_come_in_the_order_of_the_batch")
class RowsBySequence(ToyContext):
    """If only some rows are requested, they are sorted by sequence."""

    def decode(self, batch: Batch) -> Logits:
        """Sort the rows by sequence if some rows are not requested."""
        rows = super().decode(batch)
        some = not batch.logits_mask.all()
        return rows[np.argsort(batch.seq_ids[batch.logits_mask], kind="stable")] if some else rows


@mutant("TestDecode::test_a_prompt_in_chunks")
class RoomForFourChunks(ToyContext):
    """The fifth chunk in a row overwrites the last cell of the first chunk."""

    n_chunks = 0

    def decode(self, batch: Batch) -> Logits:
        """Overwrite a cell after the fifth batch that has several tokens of one sequence."""
        rows = super().decode(batch)
        self.n_chunks += len(batch) > 1 == len(set(batch.seq_ids.tolist()))
        if self.n_chunks == 5:
            cells = self.cells[int(batch.seq_ids[0])]
            cells[len(batch) - 1] = dataclasses.replace(cells[0], values=np.zeros_like(cells[0].values))
        return rows

    def replace(self, seq_id: int, cells: Sequence[Cell], edits: Sequence[Edit]) -> None:
        """Reset the count of chunks after an edit."""
        super().replace(seq_id, cells, edits)
        self.n_chunks = 0


@mutant("TestDecode::test_a_prompt_in_chunks")
class ChunksForgetEachOther(ToyContext):
    """A token attends to the tokens of its own batch only."""

    def decode(self, batch: Batch) -> Logits:
        """Decode each token after the cells of this batch only."""
        with self._call():
            self._check_batch(batch)
            fresh: list[list[Cell]] = [[] for _ in self.cells]
            rows = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                cell, logits = self.engine.step(token, fresh[seq_id])
                fresh[seq_id].append(cell)
                rows.append(logits)
            self.cells = [old + new for old, new in zip(self.cells, fresh, strict=True)]
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.logits_mask]


@mutant("TestDecode::test_rows_not_asked_for")
class AllRows(ToyContext):
    """``decode`` returns a row for every token, requested or not."""

    def decode(self, batch: Batch) -> Logits:
        """Request the logits of all tokens."""
        with_all_rows = self.new_batch()
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            with_all_rows.add(int(token), Pos(int(seq_id), int(position)), logits=True)
        return super().decode(with_all_rows)


@mutant("TestDecode::test_rows_not_asked_for")
class AtLeastOneRow(ToyContext):
    """``decode`` returns the last row if none is requested."""

    def decode(self, batch: Batch) -> Logits:
        """Request the last row if the batch requests none."""
        if batch.logits_mask.any() or not len(batch):
            return super().decode(batch)
        with_last_row = self.new_batch()
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            with_last_row.add(int(token), Pos(int(seq_id), int(position)), logits=len(with_last_row) == len(batch) - 1)
        return super().decode(with_last_row)


@mutant("TestDecodeRefusals::test_a_bad_run_after_a_good_one")
class RunsOneByOne(ToyContext):
    """A batch of several sequences is checked and decoded one sequence at a time."""

    def decode(self, batch: Batch) -> Logits:
        """Check and decode each run of tokens of one sequence as a batch of its own."""
        starts = np.flatnonzero(np.diff(batch.seq_ids, prepend=-2, append=-2))
        if len(starts) < 3:
            return super().decode(batch)
        rows = []
        for first, last in itertools.pairwise(starts.tolist()):
            run = TokenBatch(last - first)
            for i in range(first, last):
                index = Pos(int(batch.seq_ids[i]), int(batch.positions[i]))
                run.add(int(batch.tokens[i]), index, logits=bool(batch.logits_mask[i]))
            rows.append(super().decode(run))
        return np.concatenate(rows)


@mutant("TestDecodeRefusals::test_a_bad_run_after_a_good_one")
class DirtyAfterRefusal(ToyContext):
    """The tokens before an invalid token are decoded before the batch is refused."""

    def decode(self, batch: Batch) -> Logits:
        """Check and decode each token as a batch of its own."""
        rows = []
        for i in range(len(batch)):
            one = self.new_batch(1)
            one.add(int(batch.tokens[i]), Pos(int(batch.seq_ids[i]), int(batch.positions[i])), logits=True)
            rows.append(super().decode(one)[0])
        return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.logits_mask]


@mutant("TestDecodeRefusals::test_a_position_that_is_not_the_next")
class FirstPositionTrusted(ToyContext):
    """The first position of a sequence in a batch is not checked if the sequence is not empty."""

    def _check_batch(self, batch: Batch) -> None:
        checked, shifts = TokenBatch(max(1, len(batch))), dict[int, int]()
        for token, seq_id, position in zip(
            batch.tokens.tolist(), batch.seq_ids.tolist(), batch.positions.tolist(), strict=True
        ):
            length = len(self.cells[seq_id]) if 0 <= seq_id < self.n_seq_max else 0
            shift = shifts.setdefault(seq_id, length - position if length else 0)
            checked.add(token, Pos(seq_id, position + shift))
        super()._check_batch(checked)


@mutant("TestDecodeRefusals::test_a_position_that_is_not_the_next")
class PositionsIgnored(ToyContext):
    """A batch is checked for free positions only."""

    def _check_batch(self, batch: Batch) -> None:
        if len(batch) > self.n_free:
            raise ContextFull(len(batch), self.n_free)


@mutant("TestDecodeLimits::test_overflow_in_prefill")
class FillsUpThenRefuses(ToyContext):
    """A prompt that does not fit is decoded as far as it fits, and then refused."""

    def decode(self, batch: Batch) -> Logits:
        """Decode the tokens that fit before the error is raised."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            part = TokenBatch(max(1, error.free))
            for i in range(error.free):
                part.add(int(batch.tokens[i]), Pos(int(batch.seq_ids[i]), int(batch.positions[i])))
            super().decode(part)
            raise


@mutant("TestDecodeLimits::test_overflow_in_prefill")
class WrongErrorType(ToyContext):
    """A full context raises ``DecodeFailed``."""

    def decode(self, batch: Batch) -> Logits:
        """Raise ``DecodeFailed`` in place of ``ContextFull``."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise DecodeFailed("the engine returned 1") from error


@mutant("TestDecodeLimits::test_overflow_in_generation")
class NeededAndFreeSwapped(ToyContext):
    """``ContextFull`` swaps ``needed`` and ``free``."""

    def decode(self, batch: Batch) -> Logits:
        """Raise the error with ``needed`` and ``free`` swapped."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise ContextFull(error.free, error.needed) from error


@mutant("TestDecode::test_a_prompt_in_one_batch")
class DoublePrecisionRows(ToyContext):
    """Logits are float64."""

    def decode(self, batch: Batch) -> Logits:
        """Convert the logits to float64."""
        return super().decode(batch).astype(np.float64)


@mutant("TestDecode::test_a_prompt_in_chunks")
class FirstTokenAlone(ToyContext):
    """If the first batch of a sequence has one token, the token's key and value are zeros."""

    def decode(self, batch: Batch) -> Logits:
        """Set the key and value of a first batch's only token to zeros."""
        rows = super().decode(batch)
        if len(batch) == 1 and batch.positions[0] == 0:
            (cell,) = self.cells[int(batch.seq_ids[0])]
            cell.keys[...] = cell.values[...] = 0
        return rows


@mutant("TestDecode::test_strangers_beside_a_long_history")
class OneLengthForAll(ToyContext):
    """In a batch of several sequences, attention is limited to the length of the shortest sequence."""

    def decode(self, batch: Batch) -> Logits:
        """Compute the rows again with as many cells of each sequence as the shortest one has."""
        sequences = dict(enumerate(self.cells))
        together = sorted(set(batch.seq_ids.tolist()))
        shortest = min((len(self.cells[s]) for s in together if s < self.n_seq_max), default=0)
        rows = super().decode(batch)
        if len(together) > 1 and 0 < shortest < max(len(sequences[s]) for s in together):
            seen = {s: sequences[s][-shortest:] for s in together}
            for i, (token, s) in enumerate(zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True)):
                cell, rows[i] = self.engine.step(token, seen[s])
                seen[s].append(cell)
        return rows


@mutant("TestDecode::test_an_empty_batch")
class EmptyBatchRefused(ToyContext):
    """An empty batch is an error."""

    def decode(self, batch: Batch) -> Logits:
        """Raise ``DecodeFailed`` for an empty batch."""
        if len(batch) == 0:
            raise DecodeFailed("nothing to decode")
        return super().decode(batch)


class _ClearedTwice(TokenBatch):
    n_cleared = 0

    def clear(self) -> None:
        self.n_cleared += 1
        if self.n_cleared < 3:
            super().clear()


@mutant("TestDecode::test_a_batch_used_again")
class BatchWearsOut(ToyContext):
    """A batch can be cleared twice; further calls of ``clear`` do nothing."""

    def new_batch(self, capacity: int | None = None) -> Batch:
        """Return a batch that can be cleared only twice."""
        return _ClearedTwice(super().new_batch(capacity).capacity)


@mutant("TestDecodeLimits::test_n_batch_exactly")
class LastRowOfAnOddBatch(ToyContext):
    """In a full batch whose size is not a multiple of 16, the last row is a copy of the row before it."""

    def decode(self, batch: Batch) -> Logits:
        """Overwrite the last row with the row before it."""
        rows = super().decode(batch)
        if len(batch) == self.n_batch and self.n_batch % 16 and len(rows) > 1:
            rows[-1] = rows[-2]
        return rows


@mutant("TestDecodeLimits::test_more_than_n_batch")
class AnyBatchSize(ToyContext):
    """A batch larger than ``n_batch`` is decoded."""

    def _check_batch(self, batch: Batch) -> None:
        n_batch, self.n_batch = self.n_batch, max(self.n_batch, len(batch))
        try:
            super()._check_batch(batch)
        finally:
            self.n_batch = n_batch


@mutant("TestDecodeLimits::test_the_batch_has_a_capacity")
class RoomyBatches(ToyContext):
    """``new_batch`` without a capacity makes a batch for twice ``n_batch`` tokens."""

    def new_batch(self, capacity: int | None = None) -> Batch:
        """Double the default capacity."""
        batch = super().new_batch(capacity)
        return batch if capacity is not None else TokenBatch(2 * batch.capacity)


@mutant("TestDecodeLimits::test_n_ctx_exactly")
class LastSequenceReserved(ToyContext):
    """The last sequence cannot use the last free position."""

    def _check_batch(self, batch: Batch) -> None:
        super()._check_batch(batch)
        if len(batch) == self.n_free and self.n_seq_max - 1 in batch.seq_ids:
            raise ContextFull(len(batch), self.n_free - 1)


@mutant("TestDecodeLimits::test_sequences_share_the_positions")
class ThirdSequenceUncounted(ToyContext):
    """``n_free`` counts only the cells of the two longest sequences as used."""

    @property
    def n_free(self) -> int:
        """The number of free positions if only the two longest sequences are counted."""
        longest = sorted(self.cells, key=len)[-2:]
        return self.n_ctx - len({id(cell) for cells in longest for cell in cells})


@mutant("TestDecodeRefusals::test_a_token_outside_the_vocabulary")
class HighestIdIsNone(ToyContext):
    """Token 0 is decoded in place of the largest int32 token id."""

    def decode(self, batch: Batch) -> Logits:
        """Replace the largest int32 token id by 0."""
        if not (batch.tokens == 2**31 - 1).any():
            return super().decode(batch)
        replaced = TokenBatch(batch.capacity)
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            replaced.add(int(token) if token < 2**31 - 1 else 0, Pos(int(seq_id), int(position)), logits=True)
        return super().decode(replaced)


@mutant("TestDecodeRefusals::test_a_gap_inside_a_batch")
class FirstPositionsChecked(ToyContext):
    """Only the first position of a sequence in a batch is checked."""

    def _check_batch(self, batch: Batch) -> None:
        checked, following = TokenBatch(max(1, len(batch))), dict[int, int]()
        for token, seq_id, position in zip(
            batch.tokens.tolist(), batch.seq_ids.tolist(), batch.positions.tolist(), strict=True
        ):
            index = following.get(seq_id, position)
            checked.add(token, Pos(seq_id, index))
            following[seq_id] = index + 1
        super()._check_batch(checked)


@mutant("TestDecodeRefusals::test_a_sequence_that_does_not_exist")
class RawIndexError(ToyContext):
    """A ``seq_id`` equal to ``n_seq_max`` raises ``IndexError``."""

    def _check_batch(self, batch: Batch) -> None:
        if self.n_seq_max in batch.seq_ids:
            raise IndexError("list index out of range")
        super()._check_batch(batch)

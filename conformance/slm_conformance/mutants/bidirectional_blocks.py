"""Mutants that run bidirectional blocks causally, compute wrong values for them, or lose them in dumps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell
from slm_core.context.inputs import Held, HeldInput, ahead_of, row_of, token_of
from slm_core.context.ledger import replay_plan
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.protocols import Batch
from slm_core.types import Capability


class CausalContext(ToyContext):
    """Runs the blocks that ``is_causal`` selects causally, but stores them as bidirectional."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Whether the block is run causally."""
        raise NotImplementedError

    def _run_block(self, inputs: Sequence[Held], cells: Sequence[Cell], rows: Array) -> list[Cell]:
        if not self.is_causal(inputs, cells):
            return super()._run_block(inputs, cells, rows)
        block: list[Cell] = []
        for token, row in zip(inputs, rows, strict=True):
            block += super()._run_block([token], [*cells, *block], row[None])
        return block


@mutant("TestBidirectionalBlocks::test_as_declared")
class BlocksAreMissing(ToyContext):
    """Bidirectional blocks are not declared, and a batch with one raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.BIDIRECTIONAL_BLOCKS}

    def _check_blocks(self, batch: Batch) -> None:
        if batch.ahead.any():
            raise NotImplementedError


@mutant("TestBidirectionalBlocks::test_dumps_as_declared")
class DumpsBringBlocks(ToyContext):
    """Bidirectional blocks are not declared, but dumps with blocks are restored."""

    capabilities = ToyContext.capabilities - {Capability.BIDIRECTIONAL_BLOCKS}

    def _check_dumped_blocks(self, snapshot: SequenceSnapshot) -> None:
        pass


@mutant("TestBidirectionalBlocks::test_against_the_reference")
class LongBlocksAreCausal(CausalContext):
    """Bidirectional blocks longer than 16 tokens are run causally."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Run blocks of more than 16 tokens causally."""
        return len(inputs) > 16


@mutant("TestBidirectionalBlocks::test_of_rows_and_tokens")
class BlocksWithRowsAreCausal(CausalContext):
    """A bidirectional block with embedding rows in it is run causally."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Run blocks with embedding rows causally."""
        return any(row_of(token) is not None for token in inputs)


@mutant("TestBidirectionalBlocks::test_side_by_side")
class SecondBlockIsCausal(CausalContext):
    """A bidirectional block right after another is run causally."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Run a block causally if the token before it ends another block."""
        return len(cells) > 1 and ahead_of(cells[-2].token) > 0


@mutant("TestBidirectionalBlocks::test_are_kept_whole")
class BlocksInParts(ToyContext):
    """An edit may keep the first part of a bidirectional block."""

    def _check_whole_blocks(self, seq_id: int, length: int) -> None:
        pass


@mutant("TestBidirectionalBlocks::test_cut")
class CutBlocksLoseValues(ToyContext):
    """After a cut that begins in a bidirectional block, the value of the next token is 50 % too large."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Multiply the value of the first token after the cut by 1.5."""
        inside = 0 < first < len(cells) and ahead_of(cells[first - 1].token)
        after, history = super().cut_cells(cells, edits, first, last)
        if inside:
            after[first] = Cell(after[first].token, after[first].keys, after[first].values * np.float32(1.5))
        return after, history


@mutant("TestBidirectionalBlocks::test_dump_and_restore")
class DumpsLoseBlocks(ToyContext):
    """The payload of a dump has zeros for the values of bidirectional blocks."""

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Write zeros for the values of bidirectional blocks."""
        nothing = np.zeros_like(cells[0].values) if cells else np.empty(0, np.float32)
        return super().pack_payload(
            [Cell(cell.token, cell.keys, nothing) if ahead_of(cell.token) else cell for cell in cells]
        )


@mutant("TestBidirectionalBlocks::test_decoded_again")
class BlocksReturnCausal(ToyContext):
    """Bidirectional blocks that are decoded again are run causally."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        cells: list[Cell] = []
        edits: list[Edit] = []
        runs, _ = replay_plan(snapshot.held(), snapshot.edits)
        for run, edit in zip(runs, (*snapshot.edits, None), strict=True):
            for token in run:
                cells.append(self.engine.state(HeldInput(token_of(token), row_of(token)), cells)[0])
            if edit is not None:
                cells, edits = self.cut_cells(cells, edits, edit.start, edit.end)
        return cells, edits


@mutant("TestBidirectionalBlocks::test_bad_dumps")
class LongDumpedBlocks(ToyContext):
    """A dump with a bidirectional block that is longer than a batch is restored."""

    def _check_dumped_blocks(self, snapshot: SequenceSnapshot) -> None:
        n_batch, self.n_batch = self.n_batch, 1 << 20
        try:
            super()._check_dumped_blocks(snapshot)
        finally:
            self.n_batch = n_batch

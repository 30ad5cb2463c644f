"""Toys whose spans are none, are forgotten in part, or are lost on the way."""

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
    """Runs some spans as if they were none; what is held says otherwise."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Whether a span is run so."""
        raise NotImplementedError

    def _ran_span(self, inputs: Sequence[Held], cells: Sequence[Cell], rows: Array) -> list[Cell]:
        if not self.is_causal(inputs, cells):
            return super()._ran_span(inputs, cells, rows)
        made: list[Cell] = []
        for token, row in zip(inputs, rows, strict=True):
            made += super()._ran_span([token], [*cells, *made], row[None])
        return made


@mutant("TestBidirectionalBlocks::test_as_declared")
class BlocksAreMissing(ToyContext):
    """Spans are not declared, and giving some raises what Python raises."""

    capabilities = ToyContext.capabilities - {Capability.BIDIRECTIONAL_BLOCKS}

    def _check_spans(self, batch: Batch) -> None:
        if batch.ahead.any():
            raise NotImplementedError


@mutant("TestBidirectionalBlocks::test_dumps_as_declared")
class DumpsBringBlocks(ToyContext):
    """Spans are not declared, and come in by dumps."""

    capabilities = ToyContext.capabilities - {Capability.BIDIRECTIONAL_BLOCKS}

    def _check_dumped_spans(self, snapshot: SequenceSnapshot) -> None:
        pass


@mutant("TestBidirectionalBlocks::test_against_the_reference")
class LongBlocksAreNone(CausalContext):
    """Tokens of a span longer than 16 see those before them alone."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Look at the length."""
        return len(inputs) > 16


@mutant("TestBidirectionalBlocks::test_of_rows_and_tokens")
class BlocksOfTokensAlone(CausalContext):
    """A span with rows in it is none."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Look for rows."""
        return any(row_of(token) is not None for token in inputs)


@mutant("TestBidirectionalBlocks::test_side_by_side")
class SecondBlockIsNone(CausalContext):
    """A span right behind another is none."""

    def is_causal(self, inputs: Sequence[Held], cells: Sequence[Cell]) -> bool:
        """Look at the token but one before it."""
        return len(cells) > 1 and ahead_of(cells[-2].token) > 0


@mutant("TestBidirectionalBlocks::test_are_kept_whole")
class BlocksInParts(ToyContext):
    """A part of a span is kept where the rest is forgotten."""

    def _check_whole_spans(self, seq_id: int, length: int) -> None:
        pass


@mutant("TestBidirectionalBlocks::test_cut")
class CutBlocksLoseValues(ToyContext):
    """What a cut leaves of a span behind it has values that are too large."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Spoil them."""
        inside = 0 < first < len(cells) and ahead_of(cells[first - 1].token)
        after, history = super().without(cells, edits, first, last)
        if inside:
            after[first] = Cell(after[first].token, after[first].keys, after[first].values * np.float32(1.5))
        return after, history


@mutant("TestBidirectionalBlocks::test_dump_and_restore")
class DumpsLoseBlocks(ToyContext):
    """The payload of a dump has no values of tokens that see others behind them."""

    def packed(self, cells: list[Cell]) -> bytes:
        """Leave them out."""
        nothing = np.zeros_like(cells[0].values) if cells else np.empty(0, np.float32)
        return super().packed(
            [Cell(cell.token, cell.keys, nothing) if ahead_of(cell.token) else cell for cell in cells]
        )


@mutant("TestBidirectionalBlocks::test_decoded_again")
class BlocksReturnCausal(ToyContext):
    """Spans that are decoded again are none."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        cells: list[Cell] = []
        edits: list[Edit] = []
        runs, _ = replay_plan(snapshot.held(), snapshot.edits)
        for run, edit in zip(runs, (*snapshot.edits, None), strict=True):
            for token in run:
                cells.append(self.engine.state(HeldInput(token_of(token), row_of(token)), cells)[0])
            if edit is not None:
                cells, edits = self.without(cells, edits, edit.start, edit.end)
        return cells, edits


@mutant("TestBidirectionalBlocks::test_bad_dumps")
class LongDumpedBlocks(ToyContext):
    """A dump may hold spans that are longer than a batch."""

    def _check_dumped_spans(self, snapshot: SequenceSnapshot) -> None:
        n_batch, self.n_batch = self.n_batch, 1 << 20
        try:
            super()._check_dumped_spans(snapshot)
        finally:
            self.n_batch = n_batch

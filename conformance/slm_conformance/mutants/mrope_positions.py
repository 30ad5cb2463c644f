"""Mutants that lose M-RoPE offsets, or compute later positions without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.inputs import NO_OFFSETS, Held, HeldInput, offset_of, row_of, token_of
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.protocols import Batch
from slm_core.types import Capability, Logits


def as_a_token(cell: Cell) -> Cell:
    """The cell without its M-RoPE offsets."""
    row = row_of(cell.token)
    return cell if row is None else Cell(HeldInput(token_of(cell.token), row), cell.keys, cell.values)


@mutant("TestMropePositions::test_as_declared")
class OffsetsAreMissing(ToyContext):
    """M-RoPE positions are not declared, and a batch with offsets raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.MROPE_POSITIONS}

    def _check_offsets(self, batch: Batch) -> None:
        if len(batch.offsets):
            raise NotImplementedError


@mutant("TestMropePositions::test_dumps_as_declared")
class DumpsBringOffsets(ToyContext):
    """M-RoPE positions are not declared, but dumps with offsets are restored."""

    capabilities = ToyContext.capabilities - {Capability.MROPE_POSITIONS}

    def _check_dumped_offsets(self, every: Sequence[Held]) -> None:
        pass


@mutant("TestMropePositions::test_against_the_reference")
class LargeBatchesScaled(ToyContext):
    """Logits of batches with M-RoPE offsets and more than 32 tokens are 1 % too large."""

    def decode(self, batch: Batch) -> Logits:
        """Multiply the logits by 1.01 if the batch has offsets and more than 32 tokens."""
        rows = super().decode(batch)
        return rows * np.float32(1.01) if len(batch) > 32 and len(batch.offsets) else rows


@mutant("TestMropePositions::test_forked_and_truncated")
class ForksLoseOffsets(ToyContext):
    """A fork loses the M-RoPE offsets of its rows."""

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """Remove the offsets from the cells."""
        return [as_a_token(cell) for cell in cells]


@mutant("TestMropePositions::test_cut")
class CutsCountTokens(ToyContext):
    """A cut moves later tokens by the number of removed tokens, not of removed M-RoPE positions."""

    @staticmethod
    def n_mrope_positions(cells: list[Cell]) -> int:
        """Return the number of tokens."""
        return len(cells)


@mutant("TestMropePositions::test_dump_and_restore")
class DumpsLoseRowsWithOffsets(ToyContext):
    """The payload of a dump has zeros for the values of rows with M-RoPE offsets."""

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Write zeros for the values of rows with offsets."""
        nothing = np.zeros_like(cells[0].values) if cells else np.empty(0, np.float32)
        return super().pack_payload(
            [Cell(cell.token, cell.keys, nothing) if any(offset_of(cell.token)) else cell for cell in cells]
        )


@mutant("TestMropePositions::test_decoded_again")
class ReplaysLoseOffsets(ToyContext):
    """Rows that are decoded again lose their M-RoPE offsets."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(dataclasses.replace(snapshot, offsets=NO_OFFSETS))

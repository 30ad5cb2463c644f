"""Mutants that lose attention biases, or add them to other scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_conformance.mutants.above import breaks
from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, Run, ToyEngine
from slm_core.chat import records
from slm_core.context import snapshot as snapshots
from slm_core.context.batch import TokenBatch
from slm_core.context.inputs import NO_BIAS, Held, HeldInput, bias_of
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.embedding_rows import EmbeddingRows
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Pos

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


_ARRAYS = ("tokens", "seq_ids", "positions", "logits_mask", "ahead", "embeddings", "offsets")


def with_bias(cell: Cell, bias: float) -> Cell:
    """The cell with another attention bias."""
    token = cell.token
    if not isinstance(token, HeldInput):
        return cell if not bias else Cell(HeldInput(token, bias=bias), cell.keys, cell.values)
    return Cell(dataclasses.replace(token, bias=bias), cell.keys, cell.values)


def without_bias(batch: Batch) -> TokenBatch:
    """The batch without attention biases."""
    arrays = {name: getattr(batch, name) for name in _ARRAYS}
    return TokenBatch.from_arrays(**arrays, bias=NO_BIAS)


class OtherEngine(ToyContext):
    """A context with another engine."""

    engine_type: type[ToyEngine]

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(self.engine_type(engine._weights), fingerprint, options, edit_level)


@mutant("TestAttentionBias::test_as_declared")
class BiasIsMissing(ToyContext):
    """Attention biases are not declared, and a batch with one raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.ATTENTION_BIAS}

    def _check_bias(self, batch: Batch) -> None:
        if len(batch.bias):
            raise NotImplementedError


@mutant("TestAttentionBias::test_dumps_as_declared")
class DumpsBringBiases(ToyContext):
    """Attention biases are not declared, but dumps with biases are restored."""

    capabilities = ToyContext.capabilities - {Capability.ATTENTION_BIAS}

    def _check_dumped_bias(self, inputs: Sequence[Held]) -> None:
        pass


class _ScalesBiases(ToyEngine):
    def key_biases(self, inputs: Sequence[Held]) -> Array:
        """Divide the biases like scores."""
        return super().key_biases(inputs) / np.float32(np.sqrt(self.shape.head_dim))


@mutant("TestAttentionBias::test_against_the_reference")
class BiasesBeforeTheScale(OtherEngine):
    """Attention biases are added before scores are divided by the root of the head width."""

    engine_type = _ScalesBiases


@mutant("TestAttentionBias::test_against_the_reference")
class RowsAloneLoseBiases(ToyContext):
    """A row that is the only one of its batch loses its attention bias."""

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        return super()._run_batch(without_bias(batch) if len(batch.bias) == 1 else batch, run, width)


@mutant("TestAttentionBias::test_with_adapters")
class AdaptersLoseBiases(ToyContext):
    """Attention biases are not added in batches with adapters."""

    def _run_adapted(self, batch: Batch, run: Run, width: int) -> Array:
        return super()._run_adapted(without_bias(batch), run, width)


class _BiasesOwnQueries(ToyEngine):
    @staticmethod
    def added_biases(biases: Array, own: NDArray[np.bool_]) -> Array:
        """Add the biases to all scores."""
        with_room = np.maximum(biases, np.float32(-1e30))
        return np.broadcast_to(with_room, own.shape)


@mutant("TestAttentionBias::test_against_the_reference")
class BiasesOfOwnQueries(OtherEngine):
    """The bias of a row is also added to the score of the row's own query."""

    engine_type = _BiasesOwnQueries


class _WeakMasks(ToyEngine):
    def key_biases(self, inputs: Sequence[Held]) -> Array:
        """Replace -inf by -8."""
        return np.maximum(super().key_biases(inputs), np.float32(-8))


@mutant("TestAttentionBias::test_masked")
class MasksLeak(OtherEngine):
    """A bias of -inf counts as -8: masked rows keep a weight of up to 0.03 %."""

    engine_type = _WeakMasks


class _FirstKeys(ToyEngine):
    def key_biases(self, inputs: Sequence[Held]) -> Array:
        """The first key has no bias."""
        biases = super().key_biases(inputs)
        biases[0] = 0
        return biases


@mutant("TestAttentionBias::test_masked")
class FirstKeysAreNotMasked(OtherEngine):
    """A row at position 0 has no attention bias."""

    engine_type = _FirstKeys


class _LatestBiases(ToyEngine):
    latest: Array = np.zeros(0, np.float32)

    def key_biases(self, inputs: Sequence[Held]) -> Array:
        """The biases of the keys; if all are 0, the last biases that were not."""
        biases = super().key_biases(inputs)
        if biases.any():
            self.latest = biases
            return biases
        return np.resize(np.concatenate([self.latest, np.zeros(len(biases), np.float32)]), len(biases))


@mutant("TestAttentionBias::test_of_other_sequences")
class BiasesOfAnotherSequence(OtherEngine):
    """A sequence without attention biases gets those of a sequence that was computed before it."""

    engine_type = _LatestBiases


class _LaterQueries(ToyEngine):
    @staticmethod
    def added_biases(biases: Array, own: NDArray[np.bool_]) -> Array:
        """Only add biases of keys before the query's own."""
        return np.where(np.cumsum(own, axis=1) > 0, np.float32(0), biases)


@mutant("TestAttentionBias::test_in_blocks")
class BlocksBiasLaterQueries(OtherEngine):
    """In a bidirectional block, the bias of a row does not apply to the queries before it."""

    engine_type = _LaterQueries


@mutant("TestAttentionBias::test_forked_and_truncated")
class ForksLoseBiases(ToyContext):
    """A fork loses the attention biases of its rows."""

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """Remove the biases from the cells."""
        return [with_bias(cell, 0.0) for cell in cells]


@mutant("TestAttentionBias::test_cut")
class CutsLeaveBiases(ToyContext):
    """After a cut, attention biases stay at their positions, while the rows move."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Give each cell the bias of the cell that was at its position."""
        after, history = super().cut_cells(cells, edits, first, last)
        biases = [bias_of(cell.token) for cell in cells]
        return [with_bias(cell, bias) for cell, bias in zip(after, biases, strict=False)], history


@mutant("TestAttentionBias::test_cut")
class CutsLoseTheBiasBefore(ToyContext):
    """The row before a cut loses its attention bias."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Remove the bias of the last cell before the cut."""
        after, history = super().cut_cells(cells, edits, first, last)
        return [with_bias(cell, 0.0) if i == first - 1 else cell for i, cell in enumerate(after)], history


@mutant("TestAttentionBias::test_dump_and_restore")
class ReplacedTextLeavesNoBias(ToyContext):
    """A dump that replaces text is restored without attention biases."""

    def _restore(self, seq_id: int, data: bytes) -> Pos:
        is_replaced = bool(self.cells[seq_id])
        end = super()._restore(seq_id, data)
        if is_replaced:
            self.cells[seq_id] = [with_bias(cell, 0.0) for cell in self.cells[seq_id]]
        return end


@mutant("TestAttentionBias::test_dump_and_restore")
class DumpsLoseBiases(ToyContext):
    """A dump that is loaded has no attention biases."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Ignore the biases."""
        return super().unpack_payload(dataclasses.replace(snapshot, bias=NO_BIAS))


@mutant("TestAttentionBias::test_decoded_again")
class ReplaysLoseBiases(ToyContext):
    """Rows that are decoded again lose their attention biases."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(dataclasses.replace(snapshot, bias=NO_BIAS))


@breaks("TestAttentionBias::test_bad_dumps", snapshots, "_bias")
def BiasesAreNotChecked(original: Any, section: bytes, n: int) -> Any:
    """Attention biases in a dump may be any numbers."""
    return np.frombuffer(section, "<f4")


@breaks("TestAttentionBias::test_in_a_session", records, "row_inputs")
def SessionsIgnoreBiases(original: Any, rows: EmbeddingRows) -> list[Held]:
    """Rows that are appended to a session have no attention biases."""
    inputs: list[Held] = original(dataclasses.replace(rows, bias=None))
    return inputs

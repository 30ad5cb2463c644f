"""Mutants that are wrong with one KV type only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import InvalidSnapshot
from slm_core.protocols import Batch, Context
from slm_core.types import ContextOptions, KvType, Logits


class _Coarse(ToyContext):
    """A context that stores keys and values from position 80 on with 6 bits."""

    def decode(self, batch: Batch) -> Logits:
        """Round late keys and values to 6 bits after each batch."""
        rows = super().decode(batch)
        for cells in self.cells:
            for cell in cells[80:]:
                for cached in (cell.keys, cell.values):
                    step = np.abs(cached).max() / 31
                    cached[...] = np.round(cached / step) * step
        return rows


class _WithHalf(ToyModel):
    """A model that has the KV type F16, too: contexts with it are of the type ``half``."""

    half: type[ToyContext]

    def new_context(self, options: ContextOptions) -> Context:
        """Make a context of the type ``half`` if the KV type is F16."""
        is_half = options.kv_type_k is KvType.F16
        self._context_type = self.half if is_half else ToyContext
        exact = dataclasses.replace(options, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
        return super().new_context(exact if is_half else options)


@mutant("TestNumbers::test_each_kv_type", kv_types=("f32", "f16"))
class HalfIsCoarse(_WithHalf):
    """A context with a 16-bit KV type stores keys and values from position 80 on with 6 bits."""

    half = _Coarse


class _OddRefused(ToyContext):
    """A context that refuses dumps of an odd number of tokens."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Refuse an odd number of tokens."""
        if len(snapshot.tokens) % 2:
            raise InvalidSnapshot("the KV payload has half a unit")
        return super().unpack_payload(snapshot)


@mutant("TestDumpRestore::test_with_each_kv_type", kv_types=("f32", "f16"))
class HalfOddDumpsRefused(_WithHalf):
    """A context with a 16-bit KV type refuses dumps of an odd number of tokens."""

    half = _OddRefused


class _NotRotated(ToyContext):
    """A context whose cuts do not rotate keys."""

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Leave the keys as they are."""
        _, new_edits = super().cut_cells(cells, edits, first, last)
        return cells[:first] + cells[last:], new_edits


@mutant("TestCut::test_with_each_kv_type", kv_types=("f32", "f16"))
class HalfNotRotated(_WithHalf):
    """A cut does not rotate keys of a 16-bit KV type."""

    half = _NotRotated


@mutant("TestNumbers::test_the_default_kv_type")
class DefaultIsCoarse(ToyModel):
    """A context with the default KV type stores keys and values from position 80 on with 6 bits."""

    def new_context(self, options: ContextOptions) -> Context:
        """Make a coarse context if no KV type is requested."""
        self._context_type = _Coarse if options.kv_type_k is None else ToyContext
        return super().new_context(options)

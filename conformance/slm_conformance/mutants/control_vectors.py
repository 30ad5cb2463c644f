"""Mutants that lose the directions of control vectors, or add them elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slm_conformance.mutants.adapters import WithAdapters
from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Run
from slm_core.adapters import AdapterSet, LoadedAdapters
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.protocols import Batch
from slm_core.types import AdapterInfo, States


def without_directions(adapters: AdapterSet) -> AdapterSet:
    """The low-rank adapters of a set."""
    return tuple(use for use in adapters if use.adapter.changes)


@mutant("TestControlVectors::test_added_after_layers")
class DirectionsBeforeTheirLayer(ToyContext):
    """The direction of layer N is added after layer N - 1."""

    def directions_of(self, adapters: AdapterSet) -> dict[str, Array]:
        """Count layers from 1."""
        directions = super().directions_of(adapters)
        return {f"blk.{int(name.split('.')[1]) - 1}.direction": values for name, values in directions.items()}


@mutant("TestControlVectors::test_added_after_layers")
class SingleTokensWithoutDirections(ToyContext):
    """A batch of a single token computes without control vectors."""

    def _run_adapted(self, batch: Batch, run: Run, width: int) -> Array:
        sets = self.sets
        if len(batch) == 1:
            self.sets = [without_directions(adapters) for adapters in sets]
        try:
            return super()._run_adapted(batch, run, width)
        finally:
            self.sets = sets


class _WholeVectors(LoadedAdapters):
    """Control vectors that keep the directions of all layers."""

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Check the range, and list it."""
        info = super().load(path, name, layers=layers)
        if layers is not None:
            self.unload(info.name)
            super().load(path, info.name)
        return info


@mutant("TestControlVectors::test_layer_range")
class RangesAreIgnored(WithAdapters):
    """A control vector has all its directions, whatever layers were chosen."""

    kind = _WholeVectors


@mutant("TestControlVectors::test_in_one_batch")
class LowRankChangesWin(ToyContext):
    """A set with low-rank changes loses its directions."""

    def directions_of(self, adapters: AdapterSet) -> dict[str, Array]:
        """Return none if there are other changes."""
        return {} if any(use.adapter.changes for use in adapters) else super().directions_of(adapters)


@mutant("TestControlVectors::test_hidden_states")
class EmbedsWithoutDirections(ToyContext):
    """``embed`` computes without control vectors."""

    def embed(self, batch: Batch) -> States:
        """Put the control vectors aside."""
        sets = self.sets
        self.sets = [without_directions(adapters) for adapters in sets]
        try:
            return super().embed(batch)
        finally:
            self.sets = sets


@mutant("TestControlVectors::test_dumps")
class DumpsForgetDirections(ToyContext):
    """A restored sequence has only the low-rank changes of its dump."""

    def dumped_adapters(self, snapshot: SequenceSnapshot) -> AdapterSet:
        """Leave control vectors out."""
        return without_directions(super().dumped_adapters(snapshot))


class _Deeper(LoadedAdapters):
    """Directions of one layer more than the model has are accepted."""

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Pretend that the model has another layer."""
        base = self._base
        assert base is not None, "the toy takes adapters"
        self._base = dataclasses.replace(base, n_layers=base.n_layers + 1)
        try:
            return super().load(path, name, layers=layers)
        finally:
            self._base = base


@mutant("TestControlVectors::test_bad_files")
class LayersAfterTheLastAreIgnored(WithAdapters):
    """A direction for a layer after the last one is accepted, and ignored."""

    kind = _Deeper

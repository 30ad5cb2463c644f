"""Mutants that lose adapters, mix them, or compute other changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Run, ToyEngine
from slm_core.adapters import AdapterSet, LoadedAdapters
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.protocols import Adapters, Batch
from slm_core.types import AdapterInfo, Capability, Logits, Pos, States, TopLogits

_RESTORING_A_CONTEXT = 2**61


@mutant("TestAdapters::test_as_declared")
class AdaptersAreIgnored(ToyContext):
    """Adapters are not declared, and ``set_adapters`` ignores them."""

    capabilities = ToyContext.capabilities - {Capability.ADAPTERS}

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Ignore all adapters."""


@mutant("TestAdapters::test_like_merged_weights")
class SingleTokensWithoutAdapters(ToyContext):
    """A batch of a single token computes without adapters."""

    def _run_adapted(self, batch: Batch, run: Run, width: int) -> Array:
        if len(batch) > 1:
            return super()._run_adapted(batch, run, width)
        sets, self.sets = self.sets, [() for _ in self.sets]
        try:
            return self._run_batch(batch, run, width)
        finally:
            self.sets = sets


@mutant("TestAdapters::test_scales_are_added")
class LoneScalesArePositive(ToyContext):
    """A negative scale of a single adapter counts as positive."""

    def engine_with(self, adapters: AdapterSet) -> ToyEngine:
        """Take the magnitude of a lone scale."""
        if len(adapters) == 1:
            adapters = (adapters[0]._replace(scale=abs(adapters[0].scale)),)
        return super().engine_with(adapters)


@mutant("TestAdapters::test_taken_away")
class DropTakesAdapters(ToyContext):
    """``drop`` takes the adapters of the sequence away."""

    def drop(self, seq_id: int) -> None:
        """Also remove the adapters."""
        super().drop(seq_id)
        self.sets[seq_id] = ()


@mutant("TestAdapters::test_scale_zero")
class ZeroScaleIsOne(ToyContext):
    """A scale of 0 counts as 1."""

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Replace zeros."""
        super().set_adapters(seq_id, {name: 1.0 if scale == 0 else scale for name, scale in scales.items()})


@mutant("TestAdapters::test_in_one_batch")
class OneSetPerBatch(ToyContext):
    """In a batch of more than two sequences, all compute with the adapters of the first one."""

    def _run_adapted(self, batch: Batch, run: Run, width: int) -> Array:
        if len(set(batch.seq_ids.tolist())) < 3:
            return super()._run_adapted(batch, run, width)
        first, sets = self.sets[int(batch.seq_ids[0])], self.sets
        try:
            self.sets = [first for _ in sets]
            return super()._run_adapted(batch, run, width)
        finally:
            self.sets = sets


@mutant("TestAdapters::test_hidden_states")
class EmbedsWithoutAdapters(ToyContext):
    """``embed`` computes without adapters."""

    def embed(self, batch: Batch) -> States:
        """Put the adapters aside."""
        sets, self.sets = self.sets, [() for _ in self.sets]
        try:
            return super().embed(batch)
        finally:
            self.sets = sets


@mutant("TestAdapters::test_top_logits")
class TopWithoutAdapters(ToyContext):
    """``decode_top`` computes without adapters."""

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Put the adapters aside."""
        sets, self.sets = self.sets, [() for _ in self.sets]
        try:
            return super().decode_top(batch, k)
        finally:
            self.sets = sets


@mutant("TestAdapters::test_only_an_empty_sequence")
class AdaptersChangeMidway(ToyContext):
    """A sequence with tokens gets other adapters, and keeps its keys and values."""

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Accept adapters for any sequence."""
        self.sets[self._changeable(seq_id)] = self.loaded.set_of(scales)


@mutant("TestAdapters::test_forks")
class ForksWithoutAdapters(ToyContext):
    """A fork of a part of a sequence keeps the adapters of the destination."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Put the adapters of the destination back."""
        before = list(self.sets)
        pos = super().fork(src, dst, end)
        if end is not None:
            self.sets[dst] = before[dst]
        return pos


@mutant("TestAdapters::test_edits")
class TruncationTakesAdapters(ToyContext):
    """Truncating to length 0 takes the adapters away."""

    def truncate(self, pos: Pos) -> Pos:
        """Also remove the adapters if no token is left."""
        pos = super().truncate(pos)
        if pos.index == 0:
            self.sets[pos.seq_id] = ()
        return pos


@mutant("TestAdapters::test_a_failed_batch")
class FailuresTakeAdapters(ToyContext):
    """After a decode that raises, sequences have no adapters."""

    def decode(self, batch: Batch) -> Logits:
        """Remove all adapters after an error."""
        try:
            return super().decode(batch)
        except BaseException:
            self.sets = [() for _ in self.sets]
            raise


@mutant("TestAdapters::test_refused_scales")
class UnknownNamesAreSkipped(ToyContext):
    """``set_adapters`` ignores unknown names if one of the names is loaded."""

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Use the known names if there are any."""
        known = {name: scale for name, scale in scales.items() if name in self.loaded}
        super().set_adapters(seq_id, known or scales)


@mutant("TestAdapterDumps::test_goes_on")
class StepsWithoutAdapters(ToyContext):
    """A sequence that is restored in steps has no adapters afterwards."""

    def _restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        yield from super()._restore_steps(seq_id, parts)
        self.sets[seq_id] = ()


@mutant("TestAdapterDumps::test_without_adapters")
class DumpsOnlyAddAdapters(ToyContext):
    """Restoring a dump without adapters keeps the adapters of the sequence."""

    def _restore(self, seq_id: int, data: bytes) -> Pos:
        before = self.sets[seq_id]
        pos = super()._restore(seq_id, data)
        if self.n_ctx < _RESTORING_A_CONTEXT:
            self.sets[seq_id] = self.sets[seq_id] or before
        return pos


@mutant("TestAdapterDumps::test_decoded_again")
class ReplaysWithoutAdapters(ToyContext):
    """A dump that is decoded again is decoded without its adapters."""

    def _replayed(self, snapshot: SequenceSnapshot):  # type: ignore[no-untyped-def]
        return super()._replayed(dataclasses.replace(snapshot, adapters={}))


@mutant("TestAdapterDumps::test_a_failed_restore")
class FailedRestoresTakeAdapters(ToyContext):
    """A restore that does not fit takes the adapters away."""

    def _restore(self, seq_id: int, data: bytes) -> Pos:
        self.sets[seq_id] = ()
        return super()._restore(seq_id, data)


@mutant("TestAdapterDumps::test_needs_the_adapter")
class TheOnlyAdapterFits(ToyContext):
    """If one adapter is loaded, it takes the place of any adapter of a dump."""

    def dumped_adapters(self, snapshot: SequenceSnapshot) -> AdapterSet:
        """Use the only adapter."""
        if snapshot.adapters and len(self.loaded) == 1:
            return self.loaded.set_of(dict.fromkeys(self.loaded, 1.0))
        return super().dumped_adapters(snapshot)


@mutant("TestAdapterDumps::test_contexts")
class ContextsLoseAdapters(ToyContext):
    """In a restored context, sequences that share tokens with an earlier one have no adapters."""

    def restore_context(self, parts) -> None:  # type: ignore[no-untyped-def]
        """Remove the adapters of forks."""
        super().restore_context(parts)
        known_ids: set[int] = set()
        for seq_id, cells in enumerate(self.cells):
            if cells and id(cells[0]) in known_ids:
                self.sets[seq_id] = ()
            known_ids.update(map(id, cells))


@mutant("TestAdapterDumps::test_hostile_dumps")
class DumpsNameAnyAdapter(ToyContext):
    """An adapter of a dump with the fingerprint zero is skipped."""

    def dumped_adapters(self, snapshot: SequenceSnapshot) -> AdapterSet:
        """Skip adapters with the fingerprint zero."""
        known = {key: scale for key, scale in snapshot.adapters.items() if key.strip("0")}
        return super().dumped_adapters(dataclasses.replace(snapshot, adapters=known))


class _Emptying(LoadedAdapters):
    """Unloading an adapter also empties it."""

    def unload(self, name: str) -> None:
        """Remove all changes of the adapter."""
        adapter = self._named(name)
        super().unload(name)
        assert isinstance(adapter.changes, dict), "as it was read"
        adapter.changes.clear()


class _ByPath(LoadedAdapters):
    """Adapters whose fingerprint depends on the path."""

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Change the fingerprint."""
        info = super().load(path, name, layers=layers)
        adapter = self._adapters[info.name]
        other = dataclasses.replace(info, fingerprint=f"{path}"[-64:])
        self._adapters[info.name] = dataclasses.replace(adapter, info=other)
        return other


class _Lenient(LoadedAdapters):
    """Changes of tensors that the model does not have are skipped."""

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Pretend that the model has every tensor named ``x``."""
        assert self._base is not None, "the toy takes adapters"
        self._base = dataclasses.replace(self._base, shapes={**self._base.shapes, "x": (4, 4)})
        return super().load(path, name, layers=layers)


class _WithoutOutput(LoadedAdapters):
    """Changes of the output matrix are accepted, and ignored."""

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Remove the change of the output matrix."""
        info = super().load(path, name, layers=layers)
        changes = self._adapters[info.name].changes
        assert isinstance(changes, dict), "as it was read"
        changes.pop("output.weight", None)
        return info


class WithAdapters(ToyModel):
    """A model whose list of adapters is of another kind."""

    kind: type[LoadedAdapters]

    @property
    def adapters(self) -> Adapters:
        """The adapters; made at the first use."""
        if not isinstance(self.loaded, self.kind):
            self.loaded = self.kind(self.loaded._base)  # noqa: SLF001
            for context in self._contexts:
                context.loaded = self.loaded
        return self.loaded


@mutant("TestAdapterFiles::test_loading")
class UnloadedWhileInUse(WithAdapters):
    """A sequence loses the changes of an adapter that is unloaded."""

    kind = _Emptying


@mutant("TestAdapterFiles::test_fingerprints")
class FingerprintsOfPaths(WithAdapters):
    """The fingerprint of an adapter is its path."""

    kind = _ByPath


@mutant("TestAdapterFiles::test_bad_files")
class UnknownTensorsAreSkipped(WithAdapters):
    """Changes of a tensor that the model does not have are accepted."""

    kind = _Lenient


@mutant("TestAdapterFiles::test_computed_or_refused")
class OutputStaysAsItIs(WithAdapters):
    """Changes of the output matrix are accepted, and ignored."""

    kind = _WithoutOutput

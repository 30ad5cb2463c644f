"""Mutants whose backend, model or context lifecycle is wrong."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import hashlib
import itertools
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.oracle.weights import Weights
from slm_conformance.toy.backend import ToyBackend, ToyModel
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, ToyEngine
from slm_core.context.inputs import Held
from slm_core.errors import ContextBusy, InvalidModelFile, SlmError, UnsupportedModel
from slm_core.protocols import Batch, Context
from slm_core.types import (
    BackendStatus,
    ContextOptions,
    DeviceStatus,
    EditLevel,
    Logits,
    ModelOptions,
    ModelSource,
    Support,
)


@mutant("TestThreads::test_a_busy_context_refuses")
class NeverBusy(ToyContext):
    """Concurrent calls of several threads are not refused."""

    @contextmanager
    def _call(self, *, closing: bool = False) -> Iterator[None]:
        if not closing:
            self._check_open()
        yield


@mutant("TestClose::test_use_after_close")
class OpenAfterClose(ToyContext):
    """A closed context works like a new one."""

    def close(self) -> None:
        """Empty the sequences, but leave the context open."""
        self.cells = [[] for _ in self.cells]


@mutant("TestClose::test_use_after_close")
class EmptyDumpAfterClose(ToyContext):
    """A closed context can still be dumped."""

    def dump(self, seq_id: int) -> bytes:
        """Dump as if the context were open."""
        closed, self.closed = self.closed, False
        try:
            return super().dump(seq_id)
        finally:
            self.closed = closed


@mutant("TestSizes::test_kv_types")
class KvTypeIgnored(ToyModel):
    """A KV type that the backend does not support is accepted."""

    def check_kv_type(self, kv_type: object) -> None:
        """Accept any KV type."""


@mutant("TestBackend::test_fingerprint")
class FingerprintOfThePath(ToyModel):
    """The fingerprint is computed from the path."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        digest = hashlib.blake2b(str(source).encode(), digest_size=32).hexdigest()
        self.info = dataclasses.replace(self.info, fingerprint=digest)


_FINGERPRINTS: dict[tuple[str, int], str] = {}


@mutant("TestBackend::test_fingerprint")
class FingerprintOfTheHeader(ToyModel):
    """Models with the same architecture and number of parameters have the same fingerprint."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        header = self.info.architecture, self.info.n_params
        self.info = dataclasses.replace(self.info, fingerprint=_FINGERPRINTS.setdefault(header, self.info.fingerprint))


class _HalfEngine(ToyEngine):
    def _linear(self, name: str, x: Array) -> Array:
        return super()._linear(name, x.astype(np.float16).astype(np.float32))


@mutant("TestNumbers::test_against_the_reference")
class SixteenBits(ToyModel):
    """The model declares float32, but rounds the inputs of its linear layers to 16 bits."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.engine = _HalfEngine(Weights.read(source))


@mutant("TestNumbers::test_against_the_reference")
class LateRowsScaled(ToyContext):
    """From position 150 on, logits are 1 % too large."""

    def decode(self, batch: Batch) -> Logits:
        """Multiply the late rows by 1.01."""
        late = batch.positions[batch.logits_mask] >= 150
        return super().decode(batch) * np.where(late, np.float32(1.01), np.float32(1))[:, None]


class _NoSuchRow(ToyEngine):
    def run(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
        cells, logits = super().run(tokens, past)
        logits[[token == _UNUSED for token in tokens]] = np.nan
        return cells, logits


_UNUSED = 203  # no random prompt contains this token


@mutant("TestNumbers::test_every_token")
class OneTokenIsBroken(ToyModel):
    """After one rare token, logits are NaN."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.engine = _NoSuchRow(Weights.read(source))


@mutant("TestBackend::test_an_unknown_option")
class OptionIgnored(ToyBackend):
    """An unknown option is ignored."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Drop the unknown options."""
        supported = {name: value for name, value in options.backend_options.items() if name in self.load_options}
        return super().load(source, dataclasses.replace(options, backend_options=supported))


@mutant("TestBackend::test_a_missing_file")
class RawErrors(ToyBackend):
    """A missing file raises ``FileNotFoundError``, an error of the operating system."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Raise ``FileNotFoundError`` if there is no such file."""
        try:
            return super().load(source, options)
        except SlmError as error:
            if not isinstance(source, Path) or source.is_file():
                raise
            raise FileNotFoundError(str(source)) from error


@mutant("TestBackend::test_source_kinds")
class ObjectsDeclared(ToyBackend):
    """Tensor sources are declared, but only files and bytes load."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Refuse objects."""
        if not isinstance(source, Path | bytes):
            raise UnsupportedModel(f"a {type(source).__name__} is no file")
        return super().load(source, options)


@mutant("TestBackend::test_source_kinds")
class FingerprintOfTheKind(ToyModel):
    """A tensor source and a file with the same tensors have different fingerprints."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        if not isinstance(source, Path | bytes):
            self.info = dataclasses.replace(self.info, fingerprint=self.info.fingerprint[::-1])


class _InexactEngine(ToyEngine):
    def _linear(self, name: str, x: Array) -> Array:
        return super()._linear(name, x) * np.float32(1 + 2**-20)


@mutant("TestBackend::test_source_kinds")
class ObjectsRounded(ToyModel):
    """The tensors of a tensor source are rounded once more than the tensors of a file."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        if not isinstance(source, Path | bytes):
            self.engine = _InexactEngine(Weights.read(source))


@mutant("TestBackend::test_a_damaged_source")
class RawSourceErrors(ToyBackend):
    """An error of a tensor source is not converted."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Raise the object's own error."""
        try:
            return super().load(source, options)
        except InvalidModelFile as error:
            raise error.__cause__ or error from None


@mutant("TestBackend::test_an_unknown_device")
class AnyDevice(ToyBackend):
    """An unknown device is replaced by the CPU."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Replace the device by the CPU."""
        return super().load(source, dataclasses.replace(options, device="cpu"))


@mutant("TestClose::test_of_the_model")
class ContextsOutliveTheModel(ToyModel):
    """Closing a model leaves its contexts open."""

    def close(self) -> None:
        """Mark the model as closed without closing its contexts."""
        self._closed = True


@mutant("TestBackend::test_status")
class NoVersion(ToyBackend):
    """The status has no version."""

    def status(self) -> BackendStatus:
        """Return an empty version."""
        return dataclasses.replace(super().status(), version="")


@mutant("TestBackend::test_devices")
class ListsAnotherDevice(ToyBackend):
    """The status lists a device as available that cannot be used."""

    def status(self) -> BackendStatus:
        """Add an available device ``gpu``."""
        status = super().status()
        return dataclasses.replace(status, devices=(*status.devices, DeviceStatus("gpu", available=True)))


@mutant("TestBackend::test_supports_the_model")
class SupportsLies(ToyBackend):
    """``supports`` refuses a file that loads."""

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Return that the file is not supported."""
        if not isinstance(source, Path):
            return super().supports(source, device)
        return dataclasses.replace(super().supports(source, device), supported=False, reason="no such kernel")


@mutant("TestBackend::test_an_unknown_architecture")
class SupportsAnything(ToyBackend):
    """``supports`` accepts any file that can be opened."""

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Return that the file is supported if the device is ``auto`` or ``cpu``."""
        support = super().supports(source, device)
        return dataclasses.replace(support, supported=device in ("auto", "cpu"))


@mutant("TestBackend::test_info")
class ParametersUncounted(ToyModel):
    """``info`` reports 0 parameters."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.info = dataclasses.replace(self.info, n_params=0)


@mutant("TestBackend::test_a_damaged_file")
class RawParseErrors(ToyBackend):
    """A damaged file raises ``IndexError``, an error of the parser."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Raise ``IndexError`` in place of ``InvalidModelFile`` for an existing file."""
        try:
            return super().load(source, options)
        except InvalidModelFile as error:
            if isinstance(source, Path) and source.is_file():
                raise IndexError("index out of range") from error
            raise


@mutant("TestBackend::test_options_are_listed")
class OptionUndescribed(ToyBackend):
    """An option has no description."""

    load_options = MappingProxyType({"edit_level": ""})


@mutant("TestBackend::test_progress")
class ProgressNeverCalled(ToyBackend):
    """``progress`` is never called."""

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Drop the ``progress`` callback."""
        return super().load(source, dataclasses.replace(options, progress=None))


@mutant("TestSizes::test_are_as_asked")
class SizesRounded(ToyContext):
    """An ``n_ctx`` above 64 is rounded up to a multiple of 32."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        n_ctx = options.n_ctx if options.n_ctx <= 64 else -(-options.n_ctx // 32) * 32
        super().__init__(engine, fingerprint, dataclasses.replace(options, n_ctx=n_ctx), edit_level)


@mutant("TestSizes::test_are_as_asked")
class KvTypesForgotten(ToyContext):
    """``options`` has the sizes, but not the KV types."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        self.options = dataclasses.replace(options, kv_type_k=None, kv_type_v=None)


@mutant("TestSizes::test_below_one")
class SizesClamped(ToyModel):
    """A size below 1 becomes 1."""

    def new_context(self, options: ContextOptions) -> Context:
        """Raise sizes below 1 to 1."""
        sizes = {name: max(1, getattr(options, name)) for name in ("n_ctx", "n_seq_max", "n_batch")}
        return super().new_context(dataclasses.replace(options, **sizes))


@mutant("TestSizes::test_too_large")
class SizesLimited(ToyModel):
    """An ``n_batch`` above the limit becomes the limit."""

    def new_context(self, options: ContextOptions) -> Context:
        """Lower it to what positions of 31 bits allow."""
        return super().new_context(dataclasses.replace(options, n_batch=min(options.n_batch, 2**31 - 1)))


@mutant("TestSizes::test_batch_capacity")
class ZeroIsTheDefault(ToyContext):
    """``new_batch(0)`` returns a batch for ``n_batch`` tokens."""

    def new_batch(self, capacity: int | None = None) -> Batch:
        """Treat a capacity of 0 as None."""
        return super().new_batch(capacity or None)


@mutant("TestSizes::test_unknown_sequences_have_no_length")
class TokensFromTheEnd(ToyContext):
    """``tokens`` accepts a negative ``seq_id``, counted from the end."""

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """Count a negative ``seq_id`` from the end."""
        return super().tokens(seq_id + self.n_seq_max if seq_id < 0 else seq_id)


@mutant("TestClose::test_twice")
class ClosedOnceTooOften(ToyContext):
    """The third ``close`` of a context raises an error."""

    n_closed = 0

    def close(self) -> None:
        """Check at the third call that the context is open."""
        self.n_closed += 1
        if self.n_closed == 3:
            self._check_open()
        super().close()


@mutant("TestClose::test_leaves_other_contexts")
class CloseEmptiesOthers(ToyContext):
    """Closing a context with 40 tokens or more in sequence 0 empties the model's other contexts."""

    def close(self) -> None:
        """Empty the other contexts of the model if sequence 0 has 40 tokens or more."""
        shared = _CONTEXTS.setdefault(self.engine, weakref.WeakSet())
        for other in shared if len(self.cells[0]) >= 40 else ():
            other.cells = [[] for _ in other.cells]
        super().close()

    def decode(self, batch: Batch) -> Logits:
        """Add this context to the contexts that a close empties."""
        _CONTEXTS.setdefault(self.engine, weakref.WeakSet()).add(self)
        return super().decode(batch)


_CONTEXTS: weakref.WeakKeyDictionary[ToyEngine, weakref.WeakSet[ToyContext]] = weakref.WeakKeyDictionary()


@mutant("TestClose::test_the_interpreter_ends_with_open_contexts")
class AbortsAtExit(ToyContext):
    """A context that is open at the interpreter's exit aborts the process."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        atexit.register(self._abort)

    def close(self) -> None:
        """Cancel the abort at exit."""
        atexit.unregister(self._abort)
        super().close()

    @staticmethod
    def _abort() -> None:
        os._exit(134)


@mutant("TestClose::test_memory_stays_flat")
class ContextsNeverFreed(ToyContext):
    """The buffers of a closed context are not freed."""

    buffers: list[Array] = []  # noqa: RUF012  (shared by all contexts on purpose)

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        shape = engine.shape
        n_kept = 2 * options.n_ctx * shape.n_layers * shape.n_kv_heads * shape.head_dim
        self.buffers.append(np.ones(n_kept, np.float32))


@mutant("TestThreads::test_two_threads_with_one_context")
class RefusalHurtsTheNext(ToyContext):
    """After a call that was refused as busy, the next call returns doubled logits."""

    hurt = False

    def decode(self, batch: Batch) -> Logits:
        """Double the logits if the call before was refused."""
        scale, self.hurt = np.float32(1 + self.hurt), False
        try:
            return super().decode(batch) * scale
        except ContextBusy:
            self.hurt = True
            raise


class _Scratch(ToyEngine):
    past: Sequence[Cell] = ()

    def run(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
        self.past = past
        time.sleep(1e-4)  # releases the GIL, like an engine in C
        return super().run(tokens, self.past)


@mutant("TestThreads::test_contexts_in_parallel")
class ContextsShareScratch(ToyModel):
    """Contexts of one model share a scratch buffer."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.engine = _Scratch(Weights.read(source))


@mutant("TestNumbers::test_the_greedy_choice")
class NearTiesSwapped(ToyContext):
    """From position 150 on, the two largest logits of the first row with a close choice are swapped."""

    def decode(self, batch: Batch) -> Logits:
        """Swap the two largest logits of the first late row in which they are close."""
        rows = super().decode(batch)
        late = batch.positions[batch.logits_mask] >= 150
        for i in np.flatnonzero(late):
            second, best = np.argsort(rows[i])[-2:]
            gap = (rows[i, best] - rows[i, second]) / np.linalg.norm(rows[i])
            if 1e-3 < gap < 1e-2:  # above the tolerance of a row, below that of the mean
                rows[i, [second, best]] = rows[i, [best, second]]
                break
        return rows


@mutant("TestNumbers::test_the_same_again")
class LastBitsVary(ToyContext):
    """The last bits of the logits differ in every other context."""

    serial = itertools.count()

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        self.scale = np.float32(1 + 2.0**-23 * (next(self.serial) % 2))

    def decode(self, batch: Batch) -> Logits:
        """Scale the logits of every other context by one unit in the last place."""
        return super().decode(batch) * self.scale


@mutant("TestThreads::test_others_run_while_a_call_computes")
class LockHeld(ToyContext):
    """A decode of more than 256 tokens holds the GIL for most of its time."""

    def decode(self, batch: Batch) -> Logits:
        """Sleep in C without releasing the GIL, four times as long as the decode took."""
        start = time.perf_counter()
        rows = super().decode(batch)
        if len(batch) > 256:
            ctypes.PyDLL(None).usleep(int(4e6 * (time.perf_counter() - start)))
        return rows


@mutant("TestSizes::test_many_sequences_take_no_memory")
class RoomForEachSequence(ToyContext):
    """A context for more than 32 sequences allocates memory for 64 tokens of each sequence."""

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        super().__init__(engine, fingerprint, options, edit_level)
        shape = engine.shape
        sizes = options.n_seq_max, 64, 2, shape.n_layers, shape.n_kv_heads, shape.head_dim
        self.room = np.ones(sizes, np.float32) if options.n_seq_max > 32 else None

    def close(self) -> None:
        """Release the memory."""
        super().close()
        self.room = None

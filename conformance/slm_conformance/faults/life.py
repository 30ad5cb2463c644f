"""Toys whose backend, model or life is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from slm_conformance.faults.registry import fault
from slm_conformance.toy import ToyBackend, ToyModel
from slm_conformance.toy_context import ToyContext
from slm_conformance.toy_engine import Array, ToyEngine
from slm_conformance.weights import Weights
from slm_core.errors import SlmError
from slm_core.types import EditLevel, ModelOptions


@fault("TestThreads::test_a_busy_context_refuses")
class NeverBusy(ToyContext):
    """Calls of several threads are not kept apart."""

    @contextmanager
    def _call(self, *, closing: bool = False) -> Iterator[None]:
        if not closing:
            self._check_open()
        yield


@fault("TestClose::test_use_after_close")
class OpenAfterClose(ToyContext):
    """A closed context is as a new one."""

    def close(self) -> None:
        """Empty it."""
        self.cells = [[] for _ in self.cells]


@fault("TestSizes::test_kv_types")
class KvTypeIgnored(ToyModel):
    """A KV type that does not exist here is ignored."""

    def check_kv_type(self, kv_type: object) -> None:
        """Take any."""


@fault("TestBackend::test_fingerprint")
class FingerprintOfThePath(ToyModel):
    """The fingerprint is of the path."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        digest = hashlib.blake2b(str(source).encode(), digest_size=32).hexdigest()
        self.info = dataclasses.replace(self.info, fingerprint=digest)


class _HalfEngine(ToyEngine):
    def _linear(self, name: str, x: Array) -> Array:
        return super()._linear(name, x.astype(np.float16).astype(np.float32))


@fault("TestNumbers::test_against_the_reference")
class SixteenBits(ToyModel):
    """It declares float32 and computes in 16 bits."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.engine = _HalfEngine(Weights.read(source))


@fault("TestBackend::test_an_unknown_option")
class OptionIgnored(ToyBackend):
    """An option that does not exist is ignored."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Leave it out."""
        known = {name: value for name, value in options.backend_options.items() if name in self.load_options}
        return super().load(source, dataclasses.replace(options, backend_options=known))


@fault("TestBackend::test_a_missing_file")
class RawErrors(ToyBackend):
    """What the operating system raises is let through."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Raise it."""
        try:
            return super().load(source, options)
        except SlmError as error:
            raise FileNotFoundError(str(source)) from error


@fault("TestBackend::test_an_unknown_device")
class AnyDevice(ToyBackend):
    """A device that does not exist is taken for the CPU."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Take it."""
        return super().load(source, dataclasses.replace(options, device="cpu"))


@fault("TestClose::test_of_the_model")
class ContextsOutliveTheModel(ToyModel):
    """Closing a model leaves its contexts open."""

    def close(self) -> None:
        """Close the model alone."""
        self._closed = True

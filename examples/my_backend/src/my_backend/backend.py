"""The backend: the files that it can run, and how it loads a model.

This module is imported whenever a backend is chosen. Import an engine in ``load`` if its import takes long.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from my_backend.context import MyContext
from my_backend.engine import Qwen3, check_readable
from slm_core.context import ModelBase
from slm_core.errors import BackendUnavailable, InvalidOption, UnknownOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.protocols import Backend
from slm_core.tokenization import build_vocab
from slm_core.types import (
    BackendStatus,
    ContextOptions,
    DeviceStatus,
    KvType,
    ModelOptions,
    ModelSource,
    SourceKind,
    Support,
)


class MyModel(ModelBase):
    """Weights and vocabulary; makes contexts."""

    def __init__(self, source: ModelSource) -> None:
        with GgufFile.open(source) as file:
            self._engine = Qwen3(file)
            super().__init__(model_info(file, backend="mine", device="cpu"), build_vocab(file))

    def _engine_context(self, options: ContextOptions) -> MyContext:
        """An empty context; keys and values are float32."""
        for kv_type in (options.kv_type_k, options.kv_type_v):
            if kv_type not in (None, KvType.F32):  # an unsupported type is refused, not ignored
                raise InvalidOption(f"unknown KV type {kv_type.value!r} (accepted: f32)")
        return MyContext(self._engine, self.info.fingerprint, options)

    def _engine_close(self) -> None:
        """Free the weights; the contexts are already closed."""
        del self._engine


class MyBackend:
    """Loads qwen3 files whose weights are F32, F16 or Q8_0, with one thread and without options of its own."""

    name = "mine"
    load_options: Mapping[str, str] = MappingProxyType({})
    source_kinds = frozenset({SourceKind.FILE, SourceKind.BYTES, SourceKind.TENSORS})  # the sources that GgufFile opens

    def status(self) -> BackendStatus:
        """Always installed: slm-core itself needs NumPy."""
        return BackendStatus(self.name, installed=True, version="1.0", devices=(DeviceStatus("cpu", available=True),))

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether the engine knows the architecture and all tensors of the file."""
        if device not in ("auto", "cpu"):
            return Support(supported=False, reason=f"no device {device!r} (accepted: auto, cpu)")
        with GgufFile.open(source) as file:
            try:
                check_readable(file)
            except UnsupportedModel as error:
                return Support(supported=False, reason=str(error))
        return Support(supported=True, reason="in NumPy", rank=0)

    def load(self, source: ModelSource, options: ModelOptions) -> MyModel:
        """Read the whole file into memory."""
        if options.backend_options:
            raise UnknownOption(f"unknown option {min(options.backend_options)!r} (accepted: none)")
        if options.device not in ("auto", "cpu"):
            raise BackendUnavailable(f"no device {options.device!r} (accepted: auto, cpu)")
        if options.n_threads not in (None, 1):
            raise InvalidOption(f"n_threads={options.n_threads} (accepted: 1; this engine has one thread)")
        model = MyModel(source)
        if options.progress is not None:
            options.progress(1.0)
        return model


if TYPE_CHECKING:
    _: Backend = MyBackend()  # mypy compares all signatures with the protocols, down to the context's

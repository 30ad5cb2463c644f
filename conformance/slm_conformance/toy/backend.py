"""The toy backend: a slow and complete implementation of the contract in plain code. The mutants change it.

It implements the protocols without ``ContextBase``. This shows that the suite needs the protocols only. A real backend
derives its context from ``ContextBase``.
"""

from __future__ import annotations

import weakref
from types import MappingProxyType, TracebackType
from typing import Self

from slm_conformance.oracle.weights import Weights, check_readable
from slm_conformance.toy.context import PlainToyContext, ToyContext
from slm_conformance.toy.engine import ToyEngine
from slm_core.adapters import BaseModel, LoadedAdapters
from slm_core.context import check_context_options
from slm_core.errors import (
    BackendUnavailable,
    InvalidOption,
    ModelClosed,
    UnknownOption,
    UnsupportedModel,
)
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.protocols import Adapters, Context, Vocab
from slm_core.tokenization import model_vocab
from slm_core.types import (
    BackendStatus,
    ContextOptions,
    DeviceStatus,
    EditLevel,
    KvType,
    ModelInfo,
    ModelOptions,
    ModelSource,
    SourceKind,
    Support,
)


class ToyModel:
    """A loaded model: weights and vocabulary. It makes contexts."""

    def __init__(self, source: ModelSource, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        self.engine = ToyEngine(Weights.read(source))
        with GgufFile.open(source) as file:
            self.loaded = LoadedAdapters(BaseModel.of(file))
            self.info: ModelInfo = model_info(file, backend="toy", device="cpu", kv_type=KvType.F32)
            self.vocab: Vocab = model_vocab(file, self.info.n_vocab)
        self._edit_level = edit_level
        self._context_type = context_type
        self._contexts: weakref.WeakSet[ToyContext] = weakref.WeakSet()
        self._closed = False

    def new_context(self, options: ContextOptions) -> Context:
        """An empty context; the KV type is float32."""
        if self._closed:
            raise ModelClosed("the model is closed")
        check_context_options(options)
        for kv_type in (options.kv_type_k, options.kv_type_v):
            self.check_kv_type(kv_type)
        context = self._context_type(self.engine, self.info.fingerprint, options, self._edit_level)
        context.loaded = self.loaded
        self._contexts.add(context)
        return context

    @property
    def adapters(self) -> Adapters:
        """The loaded adapters."""
        return self.loaded

    def check_kv_type(self, kv_type: KvType | None) -> None:
        """Raise for KV types other than float32."""
        if kv_type not in (None, KvType.F32):
            raise InvalidOption(f"unknown KV type {kv_type.value!r} (accepted: f32)")

    def close(self) -> None:
        """Close all contexts of the model."""
        self._closed = True
        for context in list(self._contexts):
            context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ToyBackend:
    """Loads llama, qwen2 and qwen3 files whose weights are F32, F16 or Q8_0."""

    name = "toy"
    model_type: type[ToyModel] = ToyModel
    context_type: type[ToyContext] = ToyContext
    load_options = MappingProxyType({"edit_level": "the highest edit that contexts allow: replay, truncate or cut"})
    source_kinds = frozenset({SourceKind.FILE, SourceKind.BYTES, SourceKind.TENSORS})

    def status(self) -> BackendStatus:
        """Always installed."""
        return BackendStatus(self.name, installed=True, version="1", devices=(DeviceStatus("cpu", available=True),))

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether the backend reads the architecture and the types of all tensors."""
        if device not in ("auto", "cpu"):
            return Support(supported=False, reason=f"no device {device!r} (accepted: auto, cpu)")
        try:
            with GgufFile.open(source) as file:
                check_readable(file)
        except UnsupportedModel as error:
            return Support(supported=False, reason=str(error))
        return Support(supported=True, reason="slow, for tests")

    def load(self, source: ModelSource, options: ModelOptions) -> ToyModel:
        """Read the whole file into memory."""
        unknown = set(options.backend_options) - set(self.load_options)
        if unknown:
            raise UnknownOption(f"unknown option {sorted(unknown)[0]!r} (accepted: {', '.join(self.load_options)})")
        if options.device not in ("auto", "cpu"):
            raise BackendUnavailable(f"no device {options.device!r} (accepted: auto, cpu)")
        level = options.backend_options.get("edit_level", "cut")
        if level not in ("replay", "truncate", "cut"):
            raise InvalidOption(f"edit_level={level!r} (accepted: replay, truncate, cut)")
        model = self.model_type(source, EditLevel[str(level).upper()], self.context_type)
        if options.progress is not None:
            options.progress(1.0)
        return model


class PlainToyBackend(ToyBackend):
    """The toy backend with contexts that declare no capability."""

    context_type = PlainToyContext

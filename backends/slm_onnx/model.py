"""A model that ONNX Runtime has loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from slm_core.adapters import LoadedAdapters
from slm_core.context import ContextBase, ModelBase
from slm_core.protocols import Vocab
from slm_core.types import ContextOptions, ModelInfo
from slm_onnx.devicelock import on_device


class OnnxModel(ModelBase):
    """A model with the weights in ONNX Runtime, and the vocabulary. Immutable; threads may share it.

    Args:
        info: the description.
        vocab: the vocabulary.
        make: makes a context; it holds the weights, and is dropped when the model is closed.
        lock: held while the device works (``Provider.lock``).
        release: called when the model is closed.
        adapters: the adapters that are loaded for it; None if there can be none.
    """

    def __init__(
        self,
        info: ModelInfo,
        vocab: Vocab,
        make: Callable[[ContextOptions], ContextBase],
        lock: AbstractContextManager[object],
        release: Callable[[], None] = lambda: None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        super().__init__(info, vocab, adapters)
        self._make = make
        self._device_lock = lock
        self._release = release

    @on_device
    def _engine_context(self, options: ContextOptions) -> ContextBase:
        return self._make(options)

    @on_device
    def _engine_close(self) -> None:
        del self._make  # with the last reference to the weights
        self._release()

"""A model that ONNX Runtime has loaded."""

from __future__ import annotations

from collections.abc import Callable

from slm_core.context import ContextBase, ModelBase
from slm_core.protocols import Vocab
from slm_core.types import ContextOptions, ModelInfo


class OnnxModel(ModelBase):
    """A model with the weights in ONNX Runtime, and the vocabulary. Immutable; threads may share it.

    Args:
        info: the description.
        vocab: the vocabulary.
        make: makes a context; it holds the weights, and is dropped when the model is closed.
        release: called when the model is closed.
    """

    def __init__(
        self,
        info: ModelInfo,
        vocab: Vocab,
        make: Callable[[ContextOptions], ContextBase],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(info, vocab)
        self._make = make
        self._release = release

    def _engine_context(self, options: ContextOptions) -> ContextBase:
        return self._make(options)

    def _engine_close(self) -> None:
        del self._make  # with the last reference to the weights
        self._release()

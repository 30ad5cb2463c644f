"""A model that ONNX Runtime has loaded."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from slm_core.closing import Closing
from slm_core.context import ContextBase
from slm_core.errors import ModelClosed
from slm_core.protocols import Vocab
from slm_core.types import ContextOptions, ModelInfo


class OnnxModel(Closing):
    """Weights in ONNX Runtime's hands, and the vocabulary. Immutable; any thread may use it.

    Args:
        info: what is known about it.
        vocab: the vocabulary.
        make: makes a context; it holds the weights, and is let go of when the model is closed.
        release: called when the model is closed.
    """

    def __init__(
        self,
        info: ModelInfo,
        vocab: Vocab,
        make: Callable[[ContextOptions], ContextBase],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._info = info
        self._vocab = vocab
        self._make: Callable[[ContextOptions], ContextBase] | None = make
        self._release = release
        self._contexts: weakref.WeakSet[ContextBase] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def info(self) -> ModelInfo:
        """What is known about the model; stays readable after ``close``."""
        return self._info

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        self._open()
        return self._vocab

    def new_context(self, options: ContextOptions) -> ContextBase:
        """Create an empty KV cache; see ``protocols.Model.new_context``."""
        with self._lock:
            context = self._open()(options)
            self._contexts.add(context)
            return context

    def close(self) -> None:
        """Close all contexts and free the weights now; twice is fine.

        Raises:
            ContextBusy: another thread is inside a call of a context; the model stays open.
        """
        with self._lock:
            for context in list(self._contexts):
                context.close()
            self._make = None
            self._release()

    def _open(self) -> Callable[[ContextOptions], ContextBase]:
        if self._make is None:
            raise ModelClosed(f"the model {self._info.path.name} is closed")
        return self._make

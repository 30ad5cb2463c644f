"""The part of ``protocols.BackendModel`` that all backends share: open contexts, and closing."""

from __future__ import annotations

import abc
import threading
import weakref

from slm_core.adapters import LoadedAdapters
from slm_core.closing import Closing
from slm_core.errors import ModelClosed
from slm_core.interrupts import uninterrupted
from slm_core.protocols import Adapters, Context, Vocab
from slm_core.types import ContextOptions, ModelInfo


class ModelBase(Closing):
    """A loaded model. It makes contexts, and ``close`` closes them. Any thread may use it.

    A backend derives from it, calls ``__init__`` after it loaded the weights, and writes the two ``_engine`` methods.

    Args:
        info: the metadata of the model.
        vocab: its vocabulary.
        adapters: the adapters that are loaded for it.
    """

    def __init__(self, info: ModelInfo, vocab: Vocab, adapters: LoadedAdapters | None = None) -> None:
        self._info = info
        self._vocab = vocab
        self._adapters = LoadedAdapters(None) if adapters is None else adapters
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._info.summary}>"

    # The methods that a backend implements.

    @abc.abstractmethod
    def _engine_context(self, options: ContextOptions) -> Context:
        """Make an empty context. Called while the model is open, by one thread at a time."""

    @abc.abstractmethod
    def _engine_close(self) -> None:
        """Free the weights. Called once, after all contexts are closed."""

    # The contract.

    @property
    def info(self) -> ModelInfo:
        """The metadata of the model, also after ``close``."""
        return self._info

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        self._check_open()
        return self._vocab

    @property
    def adapters(self) -> Adapters:
        """The adapters that are loaded for the model."""
        self._check_open()
        return self._adapters

    def new_context(self, options: ContextOptions) -> Context:
        """Create an empty KV cache; see ``protocols.BackendModel.new_context``."""
        with self._lock:
            self._check_open()
            context = self._engine_context(options)
            self._contexts.add(context)
            return context

    def close(self) -> None:
        """Close all contexts and free the weights now. A second call does nothing.

        Raises:
            ContextBusy: another thread is inside a call of a context; the model stays open.
        """
        with uninterrupted.closing(), self._lock:
            for context in list(self._contexts):
                context.close()
            if not self._closed:
                self._closed = True
                self._adapters.clear()
                self._engine_close()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed(f"the model {self._info.path.name} is closed")

"""The noun Model: weights and vocabulary, immutable and shared between threads."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from slm_core.protocols.adapters import Adapters
from slm_core.protocols.context import Context
from slm_core.protocols.vocab import Vocab
from slm_core.types import ContextOptions, ModelInfo


class BackendModel(Protocol):
    """A loaded model. Immutable apart from its list of adapters; any thread may use it."""

    @property
    def info(self) -> ModelInfo:
        """The model's properties; readable also after ``close``."""
        ...

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        ...

    @property
    def adapters(self) -> Adapters:
        """The adapters (LoRA) that are loaded for the model."""
        ...

    def new_context(self, options: ContextOptions) -> Context:
        """Create an empty KV cache over this model.

        Raises:
            InvalidOption: a size below 1, or a KV type that the backend does not have.
            ModelClosed: after ``close``.
        """
        ...

    def close(self) -> None:
        """Free the weights now, after closing the contexts of this model. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

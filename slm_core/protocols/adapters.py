"""The noun Adapters: the adapters (LoRA, control vectors) that are loaded for a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from slm_core.types import AdapterInfo


class Adapters(Protocol):
    """The adapters of a model, by name. Threads may share this object; ``Context.set_adapters`` uses its adapters."""

    def __getitem__(self, name: str) -> AdapterInfo: ...

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def load(self, path: Path | str, name: str | None = None, *, layers: tuple[int, int] | None = None) -> AdapterInfo:
        """Load an adapter.

        Args:
            path: a GGUF file of type "adapter" or of architecture "controlvector", or a directory that PEFT's
                ``save_pretrained`` wrote.
            name: its name; None for the name of the file or directory.
            layers: the first and the last layer after which a control vector adds its directions; None for all layers
                that have a direction. Layers are counted from 0, and layer 0 has no direction, as in llama.cpp.

        Raises:
            UnsupportedInput: the backend takes no adapters for this model.
            InvalidModelFile: the adapter is missing or damaged, or belongs to another model.
            UnsupportedModel: an adapter of another kind (DoRA, aLoRA), or an adapter that changes tensors that this
                backend cannot change (experts).
            InvalidOption: there is already an adapter of this name; or ``layers`` is not a range, contains no
                direction, or the adapter is not a control vector.
            ModelClosed: after ``close`` of the model.
        """
        ...

    def unload(self, name: str) -> None:
        """Unload an adapter. Sequences that use it keep it until they get other adapters.

        Raises:
            InvalidOption: there is no such adapter.
        """
        ...

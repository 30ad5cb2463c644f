"""The interface of models whose weights are not in a file: in a database, behind a network, encrypted, computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

TensorBytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
"""The packed blocks of a tensor, contiguous."""

TENSOR_SOURCE_MEMBERS = "metadata", "tensors", "tensor_data", "fingerprint"


class TensorSource(Protocol):
    """A model by its metadata and tensors, with the names of GGUF. ``slm.load`` takes an object with these members.

    slm-core reads from the source until the model is closed, and never closes the source. The content must not change
    before. ``metadata`` and ``tensors`` are read when a model is loaded, and by ``slm.supports``. Any exception in a
    member becomes ``InvalidModelFile``, or ``DecodeFailed`` while an offloaded layer is loaded.
    """

    @property
    def metadata(self) -> Mapping[str, object]:
        """The value of each key, such as ``llama.block_count``.

        Values are a bool, an int (stored with 32 bits, unsigned), a float (32 bits), a string, a list of one of these,
        an array of int32 or float32, or bytes as ``gguf.Metadata.stored`` returns them. The ``metadata`` of a
        ``gguf.GgufFile`` is accepted, too. Keys of a file's layout (alignment, shards) have no effect.
        """
        ...

    @property
    def tensors(self) -> Mapping[str, tuple[Sequence[int], int]]:
        """The shape (rows first) and the ``gguf.GgmlType`` of each tensor, by name."""
        ...

    def tensor_data(self, name: str) -> TensorBytes:
        """The packed blocks of a tensor, in GGUF's layout.

        Called when the tensor is used: once for each tensor of a layer that stays in memory, and in every pass for each
        tensor of an offloaded layer, ahead of its use. The calling thread varies; one call runs at a time for each
        loaded model.
        """
        ...

    def fingerprint(self) -> str:
        """A digest of the content, 64 lower-case hexadecimal digits, the same in every process.

        It identifies the model in dumps and cached graphs: other weights need another fingerprint.
        """
        ...
